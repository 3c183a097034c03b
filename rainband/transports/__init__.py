"""How messages travel between nodes; the only place, besides worlds, with threads, locks and sockets."""
