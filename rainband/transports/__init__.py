"""Transports of messages between nodes; besides runtimes, the only package with threads, locks and sockets."""
