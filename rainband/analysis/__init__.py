"""Analysis of a task before training: its work and depth, the cost of an update, and the time of a step."""
