"""Commands that show and compare runs."""
