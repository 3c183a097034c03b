"""One file for each claim: CLAIM says what is claimed, how a point is measured, and what decides."""
