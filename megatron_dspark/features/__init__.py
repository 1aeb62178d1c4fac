"""What the frozen target gives the draft: taps and the final hidden state."""
