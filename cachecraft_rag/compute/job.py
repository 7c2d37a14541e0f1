"""A prefill as decided before any tensor moves, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.captures.capture import CaptureRecorder
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.compute.stale_tokens.refresh import Refresh
from cachecraft_rag.planning.config import Loading
from cachecraft_rag.planning.planner import Plan

Reselect = Callable[[Mapping[int, NDArray[np.floating]], Rows], Plan]


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Look at the prompt before the last pass.

    question  the positions of the question's own text
    choose    makes a new plan from the scores of each reused segment (float32 `[tokens]`, 1 on average over all of
              them) and the rows computed by then
    """

    question: range
    choose: Reselect


@dataclass(frozen=True, slots=True)
class EarlyTermination:
    """Algorithm 1: w, how many layers in a row must agree, and the positions of the question's own text.

    Without positions it is the whole last segment.
    """

    window: int
    question: range | None = None


@dataclass(frozen=True)
class PrefillJob:
    """Rows and chunk-caches of one prefill.

    token_ids  of the whole prompt
    rows       positions computed in any case, and why; the last segment is the question
    resident   chunk-caches in memory; the other stored ones are being loaded, see `OverlappedPrefill`
    captures   segments to record where one pass computes them whole
    capacity   positions to make room for: the prompt and the answer
    shared_until  keys and values before this position must not depend on the question: chunks before it will be
               captured for all users, and one user's question must not shape the answers of others
    reused     segments for drift correction (see `drift_correction`)
    drift      strength of the drift correction
    refresh_rows  tokens to recompute with each decode step
    """

    token_ids: Sequence[int]
    rows: Rows
    resident: Sequence[ResidentKV] = ()
    captures: Sequence[int] = ()
    capacity: int = 0
    shared_until: int = 0
    reused: Sequence[int] = ()
    drift: float = 0.0
    refresh_rows: int = 0
    loading: Loading = "cake"
    early_termination: EarlyTermination | None = None
    probe: ProbeRequest | None = None


@dataclass(frozen=True)
class PrefillResult:
    """Result of a job.

    hidden       `[streams, rows, hidden]` of the last pass: its last row is the prompt's last token
    buffer       keys and values, to decode in
    recorder     captures, perhaps none
    rows         positions computed in the end, and why
    late         segments of which tokens were computed only after other rows had attended to what was stored of them,
                 in the first layers
    plan         as chosen anew after a probe; None without one
    refresh      chooses stale tokens to recompute while decoding; None where there are none
    focus_layer  the layer that settled the focused chunks, where one did
    row_layers   rows computed, summed over passes and layers: what early termination saves shows here
    waited_s     seconds that computing waited for loading
    """

    hidden: Tensor
    buffer: KVBuffer
    recorder: CaptureRecorder
    rows: Rows
    late: frozenset[int]
    plan: Plan | None
    refresh: Refresh | None
    focus_layer: int | None
    row_layers: int
    waited_s: float
