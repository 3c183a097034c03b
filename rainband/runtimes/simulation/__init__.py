"""Runs in virtual time, with the same nodes, strategies and rules."""
