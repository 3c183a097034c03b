"""A worker's part of checkpoints."""
