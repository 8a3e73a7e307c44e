"""The block stack and its checkpoints."""
