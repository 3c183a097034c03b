"""Baselines of the benchmarks: plain PyTorch, DDP, gloo, bare sockets."""
