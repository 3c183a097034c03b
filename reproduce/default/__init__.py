"""The default of `rainband run` next to plain PyTorch: eight loops, two and four workers, and killed workers."""
