"""Writing and reading of checkpoints by the processes of a run, or by the simulator."""
