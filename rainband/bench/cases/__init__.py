"""One benchmark per file; each measures both sides of a ratio in one run."""
