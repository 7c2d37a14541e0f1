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
KERNELS = ("attend", "combine", "place", "received", "rotate", "shift_stale")


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


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton exists for Linux only")
def test_every_kernel_compiles_for_a_gpu_that_is_not_there() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "tests/kernels_gpu/compile_all.py", "90"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == {f"_{kernel}" for kernel in KERNELS}
    assert all(int(size) > 0 for _, size, *_ in lines)
    assert all(int(shared) <= 227 << 10 for _, _, shared, *_ in lines), "more than a program may have"
    assert all(line[3:] == ["wgmma"] for line in lines if line[0] in ("_attend", "_received"))
