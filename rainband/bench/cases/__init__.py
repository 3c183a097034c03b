"""One benchmark per file, each a ratio measured in one run."""
