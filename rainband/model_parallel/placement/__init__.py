"""Placement of a model's units on machines: profiles, predictions and partitioners."""
