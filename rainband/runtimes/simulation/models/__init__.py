"""Models of virtual time: the clock, the network, computing, faults and the trace. No I/O, no wall clock."""
