"""Random runs with faults, and the checks that each must pass."""
