"""Benchmarks of models on several workers."""
