"""Strategies whose workers exchange models with a few others."""
