"""Runtimes drive strategies: in processes, in a simulation, or in a custom training loop."""
