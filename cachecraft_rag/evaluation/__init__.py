"""Measures what reuse costs in answer quality and what it saves in time, on a user's own model, questions and traffic.

`cachecraft eval`, `calibrate`, `simulate` and `bench ttft` are built from this. The papers' experiments are in
`benchmarks/` of the repository, over the same parts.
"""
