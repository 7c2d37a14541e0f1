"""A short self-check when a model is loaded: is reuse exact on this model?

A model's structure can look right and still be wrong: a window that only the mask applies, or a factor in the
attention. Users should not learn this from garbled answers, so a model is refused if our results differ from those of
its own forward pass.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.row_pass import RowPass
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.warm_up import warm_up
from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.model.decoder import Decoder

logger = logging.getLogger("cachecraft_rag")
PROBE_TOKENS = 48

# Largest relative errors (L2) that count as rounding: of the logits, and of one layer's attention for the same input.
# The largest seen on sound models in bf16: 0.021 and 0.006.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}
LAYER_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.005, torch.bfloat16: 0.02}


def load_checked(name: str, *, dtype: str = "auto", device: str = "auto") -> Decoder:
    """Load a model (arguments as in `Decoder.load`) and check it by `self_check`; on a GPU, compile its kernels.

    On a CPU, a model that fails in a bfloat16 that `dtype="auto"` chose is loaded in float32 instead, with a warning in
    the log, and checked again. Kernels that cannot be compiled are logged.
    """
    decoder = Decoder.load(name, dtype=dtype, device=device)
    try:
        self_check(decoder)
    except UnsupportedModelError as error:
        if dtype != "auto" or decoder.dtype != torch.bfloat16 or decoder.device.type != "cpu":
            raise
        logger.warning("%s Loaded in float32 instead.", error)
        decoder = Decoder.load(name, dtype="float32", device=device)
        self_check(decoder)
    warm_up(decoder)
    return decoder


def self_check(decoder: Decoder) -> float:
    """Compare our results with the model's own forward on 48 random tokens, the same ones at each call.

    Compared are computing everything (gate G1), reusing the first half (gate G2), the attention of each layer, and the
    sliding window of each layer with the config. No pass of this model may run meanwhile. Raises UnsupportedModelError
    if it fails.

    Returns:
        The larger relative error (L2) of the logits for the next token in the first two, as a fraction: 0.01 is 1 %.
    """
    generator = torch.Generator().manual_seed(0)
    size = int(decoder.model.config.vocab_size)
    ids = torch.randint(0, size, (PROBE_TOKENS,), generator=generator).tolist()
    layer, error = _worst_layer(decoder, ids)
    if not error <= LAYER_TOLERANCE[decoder.dtype]:
        raise _refusal(decoder, f"the attention of layer {layer} differs by {error:.1%}")
    own = decoder.own_logits(ids)[0]
    half = PROBE_TOKENS // 2
    bounds = (0, half, PROBE_TOKENS)
    full = prefill(decoder, PrefillJob(ids, Rows.of(bounds, new=range(PROBE_TOKENS)), captures=[0]))
    stored = [ResidentKV(capture.start, capture.kv) for capture in full.recorder.captures]
    partial = prefill(
        decoder, PrefillJob(ids, Rows.of(bounds, new=range(half, PROBE_TOKENS)), resident=stored)
    )
    logits = [decoder.next_logits(out.hidden) for out in (full, partial)]
    # Not max() over floats: it misses a NaN that is not the first.
    error = float(torch.stack([(ours - own).norm() / own.norm() for ours in logits]).max())
    if not error <= TOLERANCE[decoder.dtype]:
        raise _refusal(decoder, f"the logits differ by {error:.1%}")
    _check_windows(decoder, full)
    return error


@torch.inference_mode()
def _worst_layer(decoder: Decoder, ids: list[int]) -> tuple[int, float]:
    """Return the layer with the largest error of its attention for the input of the model's own layer, and the error.

    The logits alone are too blunt in half precision: rounding adds up over the layers, and can hide a wrong layer.
    """
    with decoder.watched() as own:
        decoder.own_logits(ids)
    where = torch.arange(len(ids), device=decoder.device)
    rows = RowPass(
        decoder,
        KVBuffer(decoder, len(ids)),
        torch.tensor(ids, device=decoder.device),
        np.arange(len(ids)),
    )
    errors = []
    for layer, (hidden, expected) in enumerate(own):
        with decoder.watched() as seen:
            decoder.layer(layer, hidden, positions=where, layer_pass=rows)
        errors.append((seen[0][1].float() - expected.float()).norm() / expected.float().norm())
    worst = torch.stack(errors).nan_to_num(nan=torch.inf)
    return int(worst.argmax()), float(worst.max())


def _check_windows(decoder: Decoder, output: PrefillResult) -> None:
    """Compare each layer's window with the config: windows longer than the probe do not show in its numbers."""
    config = decoder.model.config
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    for layer, settings in enumerate(output.recorder.settings):
        is_global = kinds is not None and kinds[layer] != "sliding_attention"
        expected = None if is_global else window
        if settings.window != expected:
            raise _refusal(
                decoder,
                f"layer {layer} attends within a window of {settings.window}, not {expected}",
            )


def _refusal(decoder: Decoder, finding: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{decoder.name} ({decoder.model.config.model_type}) cannot be served from chunk-caches: in a self-check on "
        f"{PROBE_TOKENS} tokens against the model's own forward, {finding}. Its attention does something this package "
        "does not know; please report it."
    )
