"""Custom training loops: a user's script as a worker."""
