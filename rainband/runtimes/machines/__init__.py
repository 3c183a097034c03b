"""Runs on several machines: where a run listens, invitations, and machines that join."""
