"""One file per claim of speed: each a ratio, measured in one run against the limit or against what users have."""
