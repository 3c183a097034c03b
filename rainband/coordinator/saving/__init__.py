"""Saving: checkpoints, and the model of a run that has no worker left."""
