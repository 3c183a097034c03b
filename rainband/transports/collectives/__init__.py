"""Groups that perform collective operations: through shared memory, over TCP, and both."""
