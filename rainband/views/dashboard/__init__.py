"""The dashboard: a web page of a run, live or finished, computed from its directory."""
