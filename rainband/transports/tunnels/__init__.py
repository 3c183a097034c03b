"""Tunnels: connections of two workers that cannot reach each other, through the machine of the run."""
