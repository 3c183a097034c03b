"""Custom training loops: a user's script runs as a worker."""
