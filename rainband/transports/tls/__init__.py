"""TLS 1.3 for connections between machines: a run's certificate, and sockets that encrypt."""
