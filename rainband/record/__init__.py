"""Record what a run did, replay it, and calibrate a simulation from it."""
