"""Join a run from inside other people's training loops: one file per library, each needs that library installed."""
