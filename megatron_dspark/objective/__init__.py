"""The training objective: losses, gradients and metrics from hidden states, without the logits ever being stored."""
