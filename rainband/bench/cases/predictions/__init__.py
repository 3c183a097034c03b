"""Predicted and measured rates."""
