"""A worker: its client of the servers, its session and its lifecycle."""
