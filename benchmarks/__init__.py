"""Measurements anyone can repeat: ``python -m benchmarks --help``."""
