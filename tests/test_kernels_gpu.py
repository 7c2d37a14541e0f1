"""The Triton kernels' own tests, in a process of their own: under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TARGETS = {"ratio_device", "ratio_host", "attention_of_stock", "gather_of_copy"}
KERNELS = ("attend", "combine", "place", "received", "rotate", "shift_stale")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton exists for Linux only"
)
@pytest.mark.parametrize("module", ["test_attention.py", "test_moves.py", "test_passes.py"])
def test_triton_kernels(module: str) -> None:
    import torch

    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    # -P: the repository's folder `kernels` must not be importable under that name.
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"tests/kernels_gpu/{module}",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", done.stdout), "nothing ran"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton exists for Linux only"
)
def test_every_kernel_compiles_for_a_gpu_that_is_not_there() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "tests/kernels_gpu/compile_all.py", "90"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == {f"_{kernel}" for kernel in KERNELS}
    assert all(int(size) > 0 for _, size, *_ in lines)
    assert all(int(shared) <= 227 << 10 for _, _, shared, *_ in lines), (
        "more than a program may have"
    )
    assert all(line[3:] == ["wgmma"] for line in lines if line[0] in ("_attend", "_received"))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton exists for Linux only"
)
def test_the_gpu_bench_runs_on_a_toy_model_and_needs_little_else(tmp_path: Path) -> None:
    without = (
        "faiss",
        "sentence_transformers",
        "typer",
        "rich",
        "platformdirs",
        "pypdf",
        "semantic_text_splitter",
    )
    code = f"""
import runpy, sys
for name in {without}: sys.modules[name] = None  # importing it now fails
sys.argv = ["gpu.py", "--tiny", "--tokens", "22,38", "--json", {str(tmp_path / "gpu.json")!r}]
runpy.run_path("benchmarks/gpu.py", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert all(row["passed"] for row in (*report["kernels"], *report["gates"]))
    assert {row["dtype"] for row in report["kernels"]} == {"float32", "bfloat16", "float16"}
    assert {"rotate", "place", "drift", "attention, window"} <= {
        row["kernel"] for row in report["kernels"]
    }
    assert [row["tokens"] for row in report["lengths"]] == [22, 38]
    for row in report["lengths"]:
        assert all(
            row[f"ratio_{tier}"] > 0 for tier in ("device", "host", "disk", "all_recomputed")
        )
    assert {row["target"] for row in report["targets"]} == TARGETS
    assert "Kernels against float64" in done.stdout
