"""What benchmarks share: processes, clusters, models and rows."""
