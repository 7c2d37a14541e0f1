"""Benchmarks of the time to the first token: `cachecraft bench ttft`, `cake` and `load`, and their figures.

Anything that measures seconds or bytes per second belongs here; answers are compared for equality only.
"""
