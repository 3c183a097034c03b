"""Benchmarks of slow networks."""
