"""A model as a graph of units: tracing, cutting and splitting it."""
