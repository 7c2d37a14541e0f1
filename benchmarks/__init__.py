"""Experiments that are no part of the package: the papers' baselines, figures and data formats, and loads.

`python -m benchmarks` from a checkout lists the commands, one per module. They import `cachecraft_rag` as any program
does, and need the extra `bench` (`pip install -e '.[demo,bench]'`).
"""
