"""Strategies whose workers train models of their own and average them now and then."""
