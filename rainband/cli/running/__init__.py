"""Commands about runs that run now: list them, stop one, see what its processes do."""
