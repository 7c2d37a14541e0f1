"""Tests of the Triton kernels: compiled where there is a GPU, else under Triton's interpreter.

The interpreter has to be chosen before Triton is imported and would take over every pass of other tests, so these
are collected only in a process of their own, see `tests/test_kernels_gpu.py`.
"""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
