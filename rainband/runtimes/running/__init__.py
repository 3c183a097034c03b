"""Runs that run now on this machine, found and changed from another process."""
