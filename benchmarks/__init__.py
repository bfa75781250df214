"""Benchmarks beside peers: every figure is a ratio or a difference taken in the same run."""
