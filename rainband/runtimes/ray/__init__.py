"""The runtime `ray`: workers and servers on the nodes of a Ray cluster. Only functions here import Ray."""
