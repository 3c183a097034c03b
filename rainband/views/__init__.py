"""Text and pictures of runs, made from their events alone."""
