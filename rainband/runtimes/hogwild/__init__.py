"""Workers that update one copy of the parameters in shared memory, without locks."""
