"""One file per algorithm: its equations, its settings, the worker part and the server part."""
