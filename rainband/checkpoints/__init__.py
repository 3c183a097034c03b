"""Checkpoints: what a run needs to continue later, with other workers, servers and machines.

A checkpoint is a folder with safetensors files and a manifest. `commit.py` says how it is written, so that a crash at
any moment leaves the earlier ones valid; `read.py` checks a checkpoint before anything of it is used.
"""
