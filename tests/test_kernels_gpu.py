"""The Triton kernels' own tests, in a process of their own: under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TARGETS = {"ratio_device", "ratio_host", "attention_of_stock", "gather_of_copy"}
# the others run without the interpreter, in tests/benchmarks/test_gpu_where.py
PARTS_HERE = (
    "kernels",
    "gates",
    "side_stream",
    "bus",
    "ceilings",
    "attention",
    "copies",
    "lengths",
    "requests",
    "profile",
)
KERNELS = ("attend", "combine", "mean_change", "place", "received", "rotate", "write_rows")


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


def compiled(script: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a script that compiles kernels for a GPU, without the interpreter; return its lines of JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", f"tests/kernels_gpu/{script}", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


# Shared memory in bytes that a program may have, and the matrix units that attention in half precision must use.
GPUS = {
    "sm_80": (163 << 10, {"mma.sync"}),
    "sm_89": (99 << 10, {"mma.sync"}),
    "sm_90": (227 << 10, {"wgmma.mma", "mma.sync"}),
    "sm_100": (227 << 10, {"tcgen05.mma", "mma.sync"}),
    "gfx942": (64 << 10, {"v_mfma"}),
}
# `make kernels` compiles every dtype for every GPU; a normal run compiles two GPUs in full.
IN_FULL = set(GPUS) if os.environ.get("TESTS_KERNELS") == "full" else {"sm_90", "gfx942"}
# Most registers, in bytes, that a thread may keep in memory: it has 1,020 bytes of them.
MOST_SPILLED = 384


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton exists for Linux only"
)
@pytest.mark.parametrize("target", GPUS)
def test_every_kernel_compiles_for_a_gpu_that_is_not_there(target: str) -> None:
    shared, units = GPUS[target]
    dtypes = () if target in IN_FULL else ("bfloat16",)
    lines = compiled("compile_all.py", target, *dtypes)
    assert {line["kernel"] for line in lines} == {f"_{kernel}" for kernel in KERNELS}
    assert [line for line in lines if line["shared"] > shared] == []
    assert [line for line in lines if line["spilled"] > MOST_SPILLED] == []
    attention = [line for line in lines if line["kernel"] in ("_attend", "_received")]
    halves = [line for line in attention if line["dtype"] != "float32"]
    assert len(halves) >= (40 if target in IN_FULL else 26)
    assert [line for line in halves if not units & set(line["units"])] == []


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton exists for Linux only"
)
def test_requests_compile_nothing_that_the_warm_up_has_not_compiled() -> None:
    (report,) = compiled("compile_once.py")
    assert {f"_{kernel}" for kernel in KERNELS} == set(report["warm_up"])
    assert report["later"] == []


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
sys.argv = ["gpu.py", "--tiny", "--tokens", "22,38", "--minutes", "60", "--parts", {",".join(PARTS_HERE)!r}]
sys.argv += ["--json", {str(tmp_path / "gpu.json")!r}]
sys.path.append(".")  # last, so that the folder `kernels` hides no package
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["errors"] == {}
    assert all(row["passed"] for row in (*report["kernels"], *report["gates"]))
    assert {row["dtype"] for row in report["kernels"]} == {"float32", "bfloat16", "float16"}
    assert {"rotate", "place", "write_rows", "mean_change", "attention, window"} <= {
        row["kernel"] for row in report["kernels"]
    }
    assert report["left_out"] == []
    for part in PARTS_HERE:
        assert report[part], f"{part} has no rows"
    assert [row["tokens"] for row in report["lengths"]] == [22, 38, 22], "the first one again"
    for row in report["lengths"]:
        assert all(
            row[f"ratio_{side}"]
            == pytest.approx(1e-3 * min(row["series_ms"][side]) / row["own_s"], rel=0.1)
            for side in ("device", "host", "disk", "without_reuse")
        )
    assert {row["target"] for row in report["targets"]} == TARGETS
    assert "Kernels against float64" in done.stdout
