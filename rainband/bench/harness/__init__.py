"""The harness of the benchmarks: processes, clusters, models and result rows."""
