"""Prints which kernels the warm-up compiles, and which ones later requests of many kinds compile.

Launched by `tests/test_kernels_gpu.py` in a separate process, without the interpreter. Nothing is launched: results
hold arbitrary values, and only the compilations are looked at.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cachecraft_rag.compute import overlapped
from cachecraft_rag.compute.captures.capture import CaptureRecorder
from cachecraft_rag.compute.decode import extend
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.row_pass import RowPass, advance
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.stale_tokens import drift_correction
from cachecraft_rag.compute.stale_tokens.probe import QuestionProbe
from cachecraft_rag.compute.warm_up import launch_all
from cachecraft_rag.kernels.gpu import choice, tiles

sys.path.insert(0, str(Path(__file__).parent))
from compile_all import TARGETS, compiled_only

KIND = torch.bfloat16


def stack_of() -> Any:
    """Two layers of Qwen3's attention on a CPU, where the kernels are compiled for a GPU."""

    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from cachecraft_rag.model.decoder import Decoder
    from cachecraft_rag.model.demo_model import demo_model_folder

    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    )
    model = Qwen3ForCausalLM(config).to(KIND).eval()
    return Decoder(model, AutoTokenizer.from_pretrained(demo_model_folder()), name="tiny")


def requests(stack: Any) -> None:
    """Passes of many sizes: prompts, chunks, rows and questions of all lengths."""
    generator = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    for _ in range(12):
        lengths = [number(5, 120) for _ in range(number(2, 70))] + [number(2, 90)]
        bounds = [0]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        last = len(lengths) - 1
        new = {segment for segment in range(last) if number(0, 3) == 0} | {0}
        reused = [segment for segment in range(last) if segment not in new]
        resident = [
            ResidentKV(
                bounds[segment],
                torch.zeros(stack.layout.shape(lengths[segment]), dtype=KIND),
            )
            for segment in reused
        ]
        rows = Rows.of(
            bounds,
            new=[
                position
                for segment in (*sorted(new), last)
                for position in range(bounds[segment], bounds[segment + 1])
            ],
            recomputed=sorted(
                {
                    bounds[segment] + number(0, lengths[segment])
                    for segment in reused
                    for _ in range(number(1, 12))
                }
            ),
        )
        job = PrefillJob(
            [0] * bounds[-1],
            rows,
            resident=resident,
            captures=sorted(new),
            capacity=bounds[-1] + number(1, 50),
            reused=reused,
            drift=0.4,
        )
        result = prefill(stack, job)
        extend(stack, result.buffer, [0], bounds[-1])
        question = range(bounds[-2] + number(0, lengths[-1]), bounds[-1])
        probe_of(stack, rows, question)


@torch.inference_mode()
def probe_of(stack: Any, rows: Rows, question: range) -> None:
    """The probe of a question."""
    buffer = KVBuffer(stack, rows.bounds[-1])
    probe = QuestionProbe(rows, question, buffer, stack.layout.layers)
    ids = torch.zeros(len(probe.positions), dtype=torch.int64)
    row_pass = RowPass(stack, buffer, ids, probe.positions, observer=probe, absent=probe.absent)
    for _layer in range(probe.layers):
        advance(stack, [row_pass])


def main() -> None:
    """Print the kernels compiled by the warm-up and after it."""
    target = TARGETS["sm_90"]
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target.gpu,
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 0,
        )
    )
    tiles._shared_bytes = lambda _device: target.shared  # type: ignore[assignment]
    tiles._processors = lambda _device: 132  # type: ignore[assignment]
    stack = stack_of()
    # as on a GPU: Triton takes every tensor, and compiles
    choice.interpreted = lambda: True
    tiles.interpreted = lambda: False  # type: ignore[attr-defined]
    drift_correction.kernels_for = lambda *_tensors: None  # type: ignore[attr-defined]
    steps = overlapped.OverlappedPrefill.__init__

    def recorder(layout: Any, like: Any, spans: Any, *, measured: object) -> CaptureRecorder:
        return CaptureRecorder(layout, like, spans, measured=RECORDED_BOUNDS[-1])

    def init(self: Any, stack: Any, job: PrefillJob, *args: Any, **options: Any) -> None:
        RECORDED_BOUNDS.append(list(job.rows.bounds))
        steps(self, stack, job, *args, **options)

    overlapped.CaptureRecorder = recorder  # type: ignore[assignment,misc]
    overlapped.OverlappedPrefill.__init__ = init  # type: ignore[method-assign]

    compiled: dict[str, str] = {}

    def report(name: str, kernel: Any) -> None:
        compiled.setdefault(kernel.hash, name)

    JITFunction.__getitem__ = compiled_only(report)
    launch_all(stack)
    before = list(compiled.values())
    requests(stack)
    print(json.dumps({"warm_up": before, "later": list(compiled.values())[len(before) :]}))


RECORDED_BOUNDS: list[list[int]] = []

if __name__ == "__main__":
    main()
