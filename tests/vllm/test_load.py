"""The load benchmark over vLLM: a server with chunk-caches, and vLLM alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
SMALL = (
    *("--rates", "0,1", "--requests", "4", "--qps", "4", "--max-model-len", "1024"),
    *("--chunks", "2", "--words", "20", "--pool", "4", "--others-tokens", "6"),
)


@pytest.mark.slow
def test_a_started_server_is_compared_with_itself_and_with_vllm_alone(
    model_folder: Callable[[str], Path],
) -> None:
    command = [sys.executable, "-m", "benchmarks", "load", "--model", str(model_folder("Llama"))]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "VLLM_ENABLE_V1_MULTIPROCESSING"
    }
    done = subprocess.run(
        [*command, "--json", *SMALL], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    none_stored, all_stored = report["runs"]
    assert set(none_stored["sides"]) == {"vLLM alone", "reuse", "reuse off"}
    assert set(all_stored["sides"]) == {"reuse", "reuse off"}
    for run in report["runs"]:
        reuse, reuse_off = run["sides"]["reuse"], run["sides"]["reuse off"]
        assert reuse["found_share"] == run["hit_rate"]
        assert reuse["left_to_vllm"] == 0
        assert reuse["prompt_tokens"] == reuse_off["prompt_tokens"]
        for side in run["sides"].values():
            assert side["between_tokens"]["count"] == 2 * 5
            assert len(side["ttft_s"]) == 2
