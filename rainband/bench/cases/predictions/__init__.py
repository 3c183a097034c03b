"""How far predictions are from runs."""
