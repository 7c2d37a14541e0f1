"""Measurements of what reuse costs in answers, on a user's own model and questions.

`cachecraft eval` and `calibrate` are built from this, and so are the experiments in `benchmarks/` of the repository,
which may import every module here. Nothing that serves a request belongs here, and no method or data format that only
an experiment needs.
"""
