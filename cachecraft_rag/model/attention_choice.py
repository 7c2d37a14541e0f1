"""Fastest way of attending on this CPU: measured once, and kept in a file.

What was best on one CPU was the worst on another (docs/decisions/cpu-attention.md), so nothing is concluded from a
CPU's name. A choice holds for the CPU's instructions, torch's version, the number of threads, the dtype and the heads
of the model.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from cachecraft_rag.kernels.attention_paths import (
    PATHS,
    AttentionPaths,
    ShapeClass,
    attend,
    paths_for,
)
from cachecraft_rag.kernels.cpu.library import description
from cachecraft_rag.kernels.visibility import Visibility
from cachecraft_rag.model.demo_model import cache_folder
from cachecraft_rag.store.small_file import replace_file

logger = logging.getLogger("cachecraft_rag")

FILE_NAME = "attention-paths.json"
_SHAPES: Mapping[ShapeClass, tuple[int, int]] = {
    "few": (32, 1024),
    "some": (256, 2048),
    "front": (1280, 1280),
}
_ROUNDS = 5

# A path replaces the first one only if it takes less than this share of its time: measuring is not exact.
_WORTH = 0.95


def measured_paths(
    dtype: torch.dtype,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    folder: Path | None = None,
    clock: Callable[[], float] = time.process_time,
) -> AttentionPaths:
    """Return the fastest path of each class of shapes, from the file in `folder` or measured now.

    A path other than the default must save 5 % of the time. Measuring takes a fraction of a second, and its result is
    added to the file `attention-paths.json` under `machine_key`. `folder` None is `cache_folder()`. An entry or a file
    that cannot be read is made again; one that cannot be written raises nothing: paths are measured again at each call.
    Time is CPU time of the process, because other programs disturb the time of day.
    """
    file = (folder or cache_folder()) / FILE_NAME
    key = machine_key(dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    kept = _read(file)
    known_paths = _valid(kept.get(key))
    if known_paths is not None:
        return known_paths
    paths = _measure(dtype, heads, kv_heads, head_dim, clock)
    logger.debug("attention on this CPU (%s): %s", key, dict(paths.names))
    _write(file, kept | {key: dict(paths.names)})
    return paths


def machine_key(dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int) -> str:
    """Return everything that a choice depends on, as one line of text, the key of its entry in the file.

    The first call in a process loads and checks the compiled kernels.
    """
    limits = [os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")]
    used = [f"{description()} kernels", f"{torch.get_num_threads()} threads"]
    machine = [cpu_instructions(), torch.__version__, *used, *limits]
    return " / ".join(
        [*machine, str(dtype).removeprefix("torch."), f"{heads} heads, {kv_heads} kv, {head_dim}"]
    )


def cpu_instructions() -> str:
    """Return this CPU's architecture, torch's own level (such as AVX512), and names such as `avx512_bf16`, as text."""
    known = torch.cpu.get_capabilities()
    names = [
        name
        for name, there in sorted(known.items())
        if there is True and name.startswith(("avx", "amx", "sve"))
    ]
    return " ".join(
        [str(known.get("architecture", "")), torch.backends.cpu.get_cpu_capability(), *names]
    )


@torch.inference_mode()
def _measure(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, clock: Callable[[], float]
) -> AttentionPaths:
    """Return the fastest path of each class: by the shortest of a few rounds, in which all paths take turns."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)

    names: dict[ShapeClass, str] = {}
    for shape, (rows, keys) in _SHAPES.items():
        q = noise(rows, heads, head_dim)
        k = noise(keys, kv_heads, head_dim)
        v = noise(keys, kv_heads, head_dim)
        visible = Visibility(torch.arange(rows) * (keys // rows) + keys // rows - 1)
        best: dict[str, float] = {}
        for _ in range(1 + _ROUNDS):  # masks are made in the first round
            for name in paths_for(shape):
                started = clock()
                attend(q, k, v, visible, PATHS[name], scale=head_dim**-0.5, softcap=None)
                best[name] = min(best.get(name, float("inf")), clock() - started)
        first = paths_for(shape)[0]
        fastest = min(best, key=best.__getitem__)
        names[shape] = fastest if best[fastest] < _WORTH * best[first] else first
    return AttentionPaths(names)


def _valid(kept: object) -> AttentionPaths | None:
    """Return the paths of a file's entry; None if this version does not know all of them."""
    if not isinstance(kept, dict) or kept.keys() != _SHAPES.keys():
        return None
    known = all(kept[shape] in paths_for(shape) for shape in _SHAPES)
    return AttentionPaths(kept) if known else None


def _read(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(file: Path, content: Mapping[str, object]) -> None:
    """Replace the file at once: other processes read it at any time. Of two that write, the last one wins."""
    try:
        replace_file(file, json.dumps(content, indent=1).encode())
    except OSError as error:  # a read-only home: it is measured again next time
        logger.debug("%s was not written: %s", file, error)
