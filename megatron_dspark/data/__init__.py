"""From prompts and conversations to token ids with a loss mask."""
