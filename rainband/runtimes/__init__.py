"""What drives strategies: real processes, virtual time, or somebody else's launcher."""
