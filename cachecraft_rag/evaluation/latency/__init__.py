"""Benchmarks, run by `cachecraft bench`."""
