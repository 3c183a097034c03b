"""Runs as processes on this machine."""
