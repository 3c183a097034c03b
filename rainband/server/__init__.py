"""A parameter server: a state machine that owns blocks. No I/O."""
