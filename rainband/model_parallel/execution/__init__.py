"""Workers that compute one model together: each a share of it, with parameters and blocks of its own."""
