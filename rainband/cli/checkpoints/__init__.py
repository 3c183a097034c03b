"""The commands of checkpoints."""
