"""Placements and schedules as text and pictures."""
