"""Join a run from the training loop of another library: one file per library, which must be installed."""
