"""The Triton kernels' own tests, in a process of their own: under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton exists for Linux only")
@pytest.mark.parametrize("module", ["test_attention.py", "test_moves.py", "test_passes.py"])
def test_triton_kernels(module: str) -> None:
    import torch

    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    # -P: the repository's folder `kernels` must not be importable under that name.
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/kernels_gpu/{module}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", done.stdout), "nothing ran"
