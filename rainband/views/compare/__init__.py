"""Comparison of strategies by what their runs have measured: time to a target, complexity, stability, cost."""
