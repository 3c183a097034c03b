"""One file per algorithm: its equations, its settings, the worker's half and the servers' half."""
