"""What benchmarks compare with: plain PyTorch, DDP, gloo, sockets."""
