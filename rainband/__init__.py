"""Train one PyTorch model on machines you do not fully control, and know how stale, complete and far it is."""

__version__ = "0.1.0"
