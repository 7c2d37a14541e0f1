"""The two ends: the front computes while the tail is loaded, and they meet where both are done soonest.

Cake (Jin et al., 2024, Algorithm 1) computes pieces from the front and loads pieces from the back until they meet. Here
the last front piece goes along with the last pass, which the question needs anyhow, and what is still missing then
comes layer by layer just ahead of it (Cache-Craft, Algorithm 2). With a fast disk there is no front piece at all, and
all that is left of Cake is layer-wise preloading; with a very slow one all that is left is full prefill.

Nothing is configured: before every piece, and whenever the last pass has to wait, the share of the front is computed
anew from what was measured up to then. What fails to come is computed like what the front took.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType

from cachecraft_rag.planning.config import Loading
from cachecraft_rag.compute.drift_correction import Drift, Stale
from cachecraft_rag.planning.early_termination import FocusMonitor
from cachecraft_rag.planning.balance import preload_depth, tokens_to_compute
from cachecraft_rag.compute.speed import ComputeSpeed
from cachecraft_rag.store.loading.pending import Tail
from cachecraft_rag.compute.prefill import AtHand, MergedKV, PartialPrefill, PrefillOutput, Reused
from cachecraft_rag.compute.probe import Probe
from cachecraft_rag.engine.scheduling import FairLock

_PIECE = 256  # most tokens of a front piece: what is decided is decided for so long
_PROBE = 64  # tokens of the first piece on a machine that has measured nothing yet
_FIRST_LOOK_S = 0.02  # how long to wait for what may come at once, when nobody knows how fast it comes
_PATIENCE_S = 0.005  # a layer that is late by less is waited for
_WORTH_S = 0.01  # what a late piece must save
_STALL_S = 0.25  # what is late and does not move for so long will not come


class OverlappedPrefill:
    """One request's prefill while its chunk-caches are being loaded.

    Args:
        passes: the prefill, nothing computed yet.
        rows: positions that are computed whatever comes → the segment whose focus decides how long, or -1.
        reused: what is at hand.
        tail: what is to come; its readers are running.
        speed: of computing; learns from what is measured here.
        turn: held for each pass and never while nothing is computed, but for a layer that is late.
        loading: "cake"; "layerwise": nothing is taken from the tail unless it is lost; "whole": nor is anything
            computed before all of it is there.
        chunks: the positions of each reused chunk by its segment, and `drift` how far those that are not computed
            follow those that are.
        probe: chooses the recomputed rows anew before the last pass.
        edge: what stands before this position must not depend on the question, see `request.shared_edge`.
    """

    def __init__(
        self,
        passes: PartialPrefill,
        rows: Mapping[int, int],
        reused: Sequence[Reused],
        *,
        tail: Tail,
        speed: ComputeSpeed,
        turn: FairLock,
        loading: Loading = "cake",
        chunks: Mapping[int, range] = MappingProxyType({}),
        drift: float = 0.0,
        probe: Probe | None = None,
        edge: int = 0,
    ) -> None:
        self._passes, self._rows, self._reused = passes, dict(rows), list(reused)
        self._pending, self._speed, self._turn, self._loading = tail, speed, turn, loading
        self._chunks, self._drift, self._probe = dict(chunks), drift, probe
        self._edge, self._starts = edge, sorted(span.start for span in chunks.values())
        self._done: dict[int, int] = {}  # like `_rows`, of what earlier passes have computed
        self._looking: frozenset[int] | None = None  # the rows of a probe while it looks
        self._monitor: FocusMonitor | None = None
        self.waited_s = 0.0  # for what was late

    def run(self, monitor: FocusMonitor | None = None) -> PrefillOutput:
        """Prefill to the last token's logits."""
        self._monitor = monitor
        self._pending.layer_first = self._loading != "cake"
        self._look()
        while True:
            self._wait_ahead()
            with self._turn.take():
                tokens, last = self._decide()  # only now: while the turn was waited for, more has come
                self._pending.layer_first = last
                taken = self._pending.take(tokens)
                if last:
                    return self._last_pass(taken)
                if taken:
                    self._piece(taken)

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Where nothing is known, see whether it comes at once."""
        if self._loading == "cake" and not self._pending.meter.warm:
            self._wait(lambda: not self._pending.incomplete(), _FIRST_LOOK_S)

    def _decide(self) -> tuple[float, bool]:
        """How many tokens the front takes next, and whether the last pass takes them along."""
        tail, speed = self._pending, self._speed
        tokens = len(tail.incomplete())
        if self._loading != "cake" or not tokens:
            return 0, True
        if not speed.known:
            rate = tail.meter.bytes_per_s
            soon = rate > 0.0 and tail.bytes_left() / rate < 5 * _FIRST_LOOK_S
            return (0, True) if soon else (_PROBE, False)
        share = self._share(speed.rows(self._rows))
        if share <= _PIECE:
            return share, True
        return min(_PIECE, share / 2), False

    def _share(self, rows: float, *, layers_left: float = 1.0) -> float:
        """Tokens for the front, so that both ends are done at the same moment.

        Args:
            rows: what is computed whatever comes.
            layers_left: the part of the layers whose loading it still spares.
        """
        waiting, rate = self._pending.incomplete(), self._pending.meter.bytes_per_s
        if not waiting:
            return 0.0
        if rate <= 0.0:  # nothing has ever come
            return float(len(waiting))
        load_s = self._pending.bytes_left() / rate
        token_s = self._speed.seconds(self._speed.rows(waiting[:_PIECE]), passes=0) / min(_PIECE, len(waiting))
        share = tokens_to_compute(
            load_s=load_s,
            compute_s=self._speed.seconds(rows),
            load_token_s=load_s / len(waiting) * layers_left,
            compute_token_s=token_s,
        )
        return min(max(share, 0.0), float(len(waiting)))

    # -- passes -------------------------------------------------------------------------------------------------------

    def _piece(self, taken: list[int]) -> None:
        """Compute these and whatever rows stand before the last of them."""
        self._note_holes()
        edge = taken[-1] + 1
        rows = sorted({*taken, *(position for position in self._rows if position < edge)})
        here = [reused for reused in self._reused if reused.start < edge]
        self._reused = self._reused[len(here) :]
        self._rows.update(dict.fromkeys(taken, -1))
        started = time.perf_counter()
        self._passes.compute(rows, _Piece(AtHand(here), self._pending, edge), drift=self._correction(edge))
        self._speed.measured(self._speed.rows(rows), time.perf_counter() - started)
        self._done.update((position, self._rows.pop(position)) for position in rows)

    def _last_pass(self, taken: list[int]) -> PrefillOutput:
        self._note_holes()
        self._rows.update(dict.fromkeys(taken, -1))
        supply = _LastPiece(AtHand(self._reused), self._pending, self)
        if self._probe is not None:
            looking = self._probe.positions(self._rows, self._done)
            self._looking = frozenset(looking)
            self._rows = self._probe.look(self._passes, supply, looking, rows=self._rows, done=self._done)
            self._looking = None
            supply.intact_layers = self._probe.intact_layers
        rows = sorted(self._rows)
        waited, started = self.waited_s, time.perf_counter()
        drift = self._correction(math.inf)
        known = {capture.segment for capture in self._passes.recorder.captures}
        output = self._passes.finish(
            rows, supply, owners=self._rows, monitor=self._monitor, edge=self._edge, drift=drift
        )
        self._forget_what_the_question_shaped(known)
        spent = time.perf_counter() - started - (self.waited_s - waited)
        if not supply.joined and (self._monitor is None or self._monitor.focused is None):
            self._speed.measured(self._speed.rows(rows), spent)
        return output

    def _forget_what_the_question_shaped(self, known: Set[int]) -> None:
        """Keep no captures of chunks that were to be loaded, if their context depends on the question.

        Which ones the last pass takes over is not known when the probe looks, and most are stored already. Those of
        earlier passes are `known`.
        """
        if self._monitor is None and (self._probe is None or not self._probe.private):
            return
        first = next((start for start in self._starts if start >= self._edge), math.inf)
        recorder = self._passes.recorder
        for capture in recorder.captures:
            if capture.segment not in known and capture.start > first:
                recorder.forget(capture.segment)

    def _correction(self, edge: float) -> Drift | None:
        """How the pass that ends at `edge` corrects the chunks before it, each once: in the pass that ends it."""
        chunks = {segment: span for segment, span in self._chunks.items() if span.stop <= edge}
        for segment in chunks:
            del self._chunks[segment]
        if not chunks or not self._drift:
            return None
        stale = [
            Stale(segment, _runs(position for position in span if position not in self._done))
            for segment, span in chunks.items()
        ]
        merged = self._passes.merged
        return Drift(stale, self._rows, strength=self._drift, cos=merged.cos, sin=merged.sin)

    def late(self, layer: int) -> list[int]:
        """Wait until `layer` is there; returns what had better be computed instead, or has to be."""
        late: list[int] = []
        reads, moved = self._pending.reads, time.perf_counter()
        while True:
            late += self._pending.holes()
            if self._wait(lambda: self._pending.depth() > layer, _PATIENCE_S):
                late += self._pending.holes()
                break
            if self._loading != "cake":
                continue
            if reads != self._pending.reads:
                reads, moved = self._pending.reads, time.perf_counter()
            if time.perf_counter() - moved > _STALL_S:
                late += self._pending.take(math.inf)
            elif self._looking is None:  # a probe waits: what it took would have to be computed twice
                late += self._take_over(layer, late)
        rows = sorted(position for position in set(late) if not self._is_running(position))
        self._rows.update(dict.fromkeys(late, -1))
        return rows

    def _is_running(self, position: int) -> bool:
        """Whether the pass has a row there: not one that early termination has dropped."""
        if self._looking is not None:
            return position in self._looking
        owner = self._rows.get(position)
        focused = self._monitor.focused if self._monitor is not None else None
        if owner is None or owner < 0 or focused is None:
            return owner is not None
        return owner - 1 in focused or position < self._edge

    def _take_over(self, layer: int, late: Sequence[int]) -> list[int]:
        """Positions that are sooner computed, from the first layer on, than waited for in the layers still to come."""
        speed, layers = self._speed, self._pending.layers
        if not speed.known:
            return []
        left = 1.0 - layer / layers
        rows = left * speed.rows(self._rows) + speed.rows(late)
        share = self._share(rows, layers_left=left)  # with what is left of this pass, and catching up
        rate = self._pending.meter.bytes_per_s
        saved = share * self._pending.bytes_left() / max(len(self._pending.incomplete()), 1) / rate if rate > 0.0 else 1.0
        return self._pending.take(share) if saved > _WORTH_S else []

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait_ahead(self) -> None:
        """Before taking the turn: have as many layers as it takes to compute without a gap (eq. 16)."""
        tail, speed, rate = self._pending, self._speed, self._pending.meter.bytes_per_s
        if self._loading == "whole":
            self._wait(lambda: not tail.incomplete(), None)
        elif self._loading == "layerwise":
            prefill_s = speed.seconds(speed.rows(self._rows)) if speed.known else 0.0
            depth = preload_depth(tail.layers, prefill_s=prefill_s, load_s=tail.bytes_left() / rate if rate else 0.0)
            self._wait(lambda: tail.depth() >= depth, None)

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        started = time.perf_counter()
        done = self._pending.wait(ready, timeout)
        self.waited_s += time.perf_counter() - started
        return done

    def _note_holes(self) -> None:
        self._rows.update(dict.fromkeys(self._pending.holes(), -1))


def _runs(positions: Iterable[int]) -> list[range]:
    """Ascending positions as runs of adjoining ones."""
    runs: list[range] = []
    for position in positions:
        if runs and runs[-1].stop == position:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
    return runs


class _Piece:
    """What stands before the end of a front piece."""

    def __init__(self, here: AtHand, tail: Tail, edge: int) -> None:
        self._here, self._pending, self._edge = here, tail, edge

    def place(self, layer: int, merged: MergedKV) -> Sequence[int]:
        """See `Supply.place`."""
        self._here.place(layer, merged)
        self._pending.place(layer, merged, below=self._edge)
        return ()


class _LastPiece:
    """Everything else, layer by layer as it comes."""

    def __init__(self, here: AtHand, tail: Tail, ends: OverlappedPrefill) -> None:
        self._here, self._pending, self._ends = here, tail, ends
        self.joined = False
        self.intact_layers = 0  # placed already

    def place(self, layer: int, merged: MergedKV) -> Sequence[int]:
        """See `Supply.place`."""
        if layer >= self.intact_layers:
            self._here.place(layer, merged)
        late = self._ends.late(layer)
        if layer >= self.intact_layers:
            self._pending.place(layer, merged)
        self.joined |= bool(late)
        return late
