"""Warm-up of a GPU: compiles kernels before the first request, because each takes seconds.

Triton compiles a kernel at its first launch, once for each size of tile, each dtype and each set of features, and keeps
the result in a folder (`TRITON_CACHE_DIR`) for later processes. The passes here launch the kernels that requests with
default settings use: one row and many, keys split and not, captures in prompts of few and of many segments, placing,
drift correction and the probe.
"""

from __future__ import annotations

import logging
import time

import torch

from cachecraft_rag.compute.decode import extend
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.row_pass import RowPass, advance
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.stack import Stack
from cachecraft_rag.compute.stale_tokens.probe import QuestionProbe
from cachecraft_rag.kernels.gpu.choice import uses_triton

logger = logging.getLogger("cachecraft_rag.warm_up")

# Keys of a prompt whose keys are not split among programs, and of one whose keys are.
_KEYS = (256, 1024)
# Segments of a prompt: one number for each width of the columns that sum up attention.
_SEGMENTS = (8, 24, 48, 100)
# Rows of a pass: more than the smallest tile holds, and so few that they do not fill a GPU.
_NEW = 32
_QUESTION = 18


def warm_up(stack: Stack) -> None:
    """Compile the kernels of a stack on a GPU; does nothing on a CPU, and where Triton does not run.

    Every tensor-parallel rank has to call it. An exception is logged: kernels that are missing then are compiled by the
    first request that uses them.
    """
    device = stack.device
    if device.type != "cuda" or not uses_triton(torch.empty(0, dtype=stack.dtype, device=device)):
        return
    began = time.perf_counter()
    try:
        launch_all(stack)
    # whatever Triton or the device raises: the first request that uses a kernel compiles it, or reports why not
    except Exception:
        logger.exception("The kernels could not be compiled before the first request")
        return
    logger.info("The kernels were compiled in %.1f s", time.perf_counter() - began)


def launch_all(stack: Stack) -> None:
    """Launch each kernel that requests with default settings use, in passes over prompts of up to 1,025 tokens.

    Does not wait for the GPU's last work. On a CPU the same passes are computed without Triton.
    """
    for keys in _KEYS:
        for segments in _SEGMENTS:
            _reuse(stack, keys, segments)
        _probe(stack, keys)


def _reuse(stack: Stack, keys: int, segments: int) -> None:
    """Fill a prompt of chunks in memory and one new chunk that is captured; then compute one more token."""
    question = keys - _QUESTION
    new = question - _NEW
    tokens = new // segments
    bounds = [*range(0, tokens * segments, tokens), new, question, keys]
    reused = range(1, segments)
    kv = torch.zeros(stack.layout.shape(tokens), dtype=stack.dtype, device=stack.device)
    resident = [ResidentKV(bounds[segment], kv) for segment in reused]
    rows = Rows.of(
        bounds,
        new=[*range(bounds[1]), *range(new, keys)],
        recomputed=[start.start + offset for start in resident for offset in range(2)],
    )
    job = PrefillJob(
        [0] * keys,
        rows,
        resident=resident,
        captures=[segments],
        capacity=keys + 1,
        reused=list(reused),
        drift=0.4,
    )
    result = prefill(stack, job)
    extend(stack, result.buffer, [0], keys)


@torch.inference_mode()
def _probe(stack: Stack, keys: int) -> None:
    """Probe a prompt, once with all keys and once with keys that are absent."""
    question = range(keys - _QUESTION, keys)
    for new in (range(0), range(8, 16)):
        buffer = KVBuffer(stack, keys)
        rows = Rows.of([0, 8, 16, question.start, keys], new=[*new, *question])
        probe = QuestionProbe(rows, question, buffer, stack.layout.layers)
        ids = torch.zeros(len(probe.positions), dtype=torch.int64, device=stack.device)
        row_pass = RowPass(stack, buffer, ids, probe.positions, observer=probe, absent=probe.absent)
        for _layer in range(probe.layers):
            advance(stack, [row_pass])
