"""A prefill as it was decided before any tensor moves, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.captures.capture import CaptureRecorder
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.planning.config import Loading
from cachecraft_rag.planning.planner import Plan
from cachecraft_rag.store.layout import StoredVariant
from cachecraft_rag.types.variants import TierName

Reselect = Callable[[Mapping[int, NDArray[np.floating]], Rows, Mapping[int, float]], Plan]


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Request for a probe before the last pass.

    question  positions of the question's own text
    choose    makes a new plan from the scores of each reused segment that the probe sees (float32 `[tokens]`, 1 on
              average over all of them), the rows computed by then, and the focus score of each chunk that it saw
    """

    question: range
    choose: Reselect


@dataclass(frozen=True, slots=True)
class EarlyTermination:
    """Settings of early termination (Algorithm 1).

    window    w of the paper: number of consecutive layers that must agree
    question  positions of the question's own text; None = the whole last segment
    """

    window: int
    question: range | None = None


@dataclass(frozen=True)
class PrefillJob:
    """Rows and chunk-caches of one prefill, as planned; `close` it.

    token_ids     token ids of the whole prompt, `[tokens]`
    rows          positions that are computed in any case, with their reasons; the last segment is the question
    plan          the plan that it carries out; without segments if it was made without one
    resident      chunk-caches in memory
    stored        segment index → its open chunk-cache that is still to be loaded
    tiers         variant id → the tier that holds it, of the chunk-caches that are read
    captures      segments to record if one pass computes them whole
    capacity      number of positions to make room for: the prompt, which always gets room, and the answer
    shared_until  position up to which keys and values must not depend on the question: chunks before it will be
                  captured for all users, and one user's question must not shape the answers of others
    reused        segments for drift correction (see `drift_correction`)
    unread        those of `reused` that are recomputed in full and not read: they are neither resident nor loaded, a
                  probe does not see them, and their rows must not be dropped
    drift         strength of drift correction
    loading       strategy for chunk-caches that are not in memory
    early_termination  settings of early termination; None = off
    probe         request for a probe; None = no probe
    """

    token_ids: Sequence[int] | NDArray[np.integer]
    rows: Rows
    plan: Plan = ()
    resident: Sequence[ResidentKV] = ()
    stored: Mapping[int, StoredVariant] = field(default_factory=dict)
    tiers: Mapping[str, TierName] = field(default_factory=dict)
    captures: Sequence[int] = ()
    capacity: int = 0
    shared_until: int = 0
    reused: Sequence[int] = ()
    unread: Set[int] = frozenset()
    drift: float = 0.0
    loading: Loading = "cake"
    early_termination: EarlyTermination | None = None
    probe: ProbeRequest | None = None

    @property
    def to_load(self) -> list[tuple[StoredVariant, int]]:
        """Pairs of a chunk-cache to load and its first position in the prompt, in prompt order."""
        bounds = self.rows.bounds
        return [(variant, bounds[index]) for index, variant in self.stored.items()]

    @property
    def not_needed(self) -> frozenset[int]:
        """Positions with stored keys and values that need not be loaded; none with a probe, which sees all of them."""
        return frozenset() if self.probe is not None else frozenset(self.unused(self.rows).tolist())

    def close(self) -> None:
        """Close the chunk-caches of `stored`; tensors that were loaded stay usable."""
        for variant in self.stored.values():
            variant.close()

    def unused(self, rows: Rows, *, may_drop: bool = True) -> NDArray[np.int64]:
        """Return the recomputed positions whose stored keys and values nothing uses, int64, ascending.

        Drift correction uses those of a chunk with stale tokens, and early termination, if it still `may_drop` rows,
        those from `shared_until` on. Call it once no probe can change the rows any more.
        """
        is_unused = rows.reason == RowReason.RECOMPUTED
        if self.drift:
            is_stale = np.zeros(len(rows.bounds) - 1, bool)  # [segments]
            is_stale[rows.segment[rows.reason == RowReason.STORED]] = True
            is_unused &= ~is_stale[rows.segment]
        if may_drop and self.early_termination is not None:
            is_unused[self.shared_until :] = False
        return np.flatnonzero(is_unused)


@dataclass(frozen=True)
class PrefillResult:
    """Result of a job.

    hidden       `[streams, rows, hidden]`, hidden states of the last pass; the last row is the last open position,
                 usually the prompt's last token. `[0]` if the stack's `whole_model` ran that pass
    buffer       keys and values, to decode in
    recorder     recorded captures, possibly none
    rows         positions that were computed in the end, with their reasons
    late         segments with tokens that were computed only after other rows had attended to their stored values in
                 the first layers
    plan         plan after the probe; None without a probe
    focus_layer  layer that settled the focused chunks; None = no layer did
    row_layers   number of computed rows, summed over passes and layers; early termination lowers it
    waited_s     time that computing waited for loading, in seconds
    """

    hidden: Tensor
    buffer: KVBuffer
    recorder: CaptureRecorder
    rows: Rows
    late: frozenset[int]
    plan: Plan | None
    focus_layer: int | None
    row_layers: int
    waited_s: float
