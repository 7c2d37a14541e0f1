"""Probes: a first look with a few rows or a few layers, for selectors that choose by what the prompt at hand shows.

A probe runs just before the last pass, over the chunk-caches as they are stored. Its time is part of TTFT. Until then
the request goes by a choice made without it, so that loading and computing can begin; what the front has computed by
then stays computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from cachecraft_rag.compute.capture import AttentionSettings
from cachecraft_rag.kernels.attention import attention_mass, row_blocks
from cachecraft_rag.planning.planner import Plan
from cachecraft_rag.compute.prefill import MergedKV, PartialPrefill, Supply

QUESTION_ROWS = 64  # most rows of a probe: a long conversation is not read twice
_VALUE_LAYER = 1  # the first layer whose values depend on other tokens

Tokens = Mapping[int, frozenset[int]]  # segment → offsets
Choose = Callable[[Mapping[int, np.ndarray], Tokens, Tokens], Plan]


class Probe(ABC):
    """Looks once, and plans anew by what it saw.

    Args:
        plan: what was planned without it.
        bounds: `[segments + 1]` of the prompt.
        question: the positions of the question's own text.
        choose: makes the new plan from what was seen of each reused segment (float32 `[tokens]`), what of it is
            recomputed already and what is computed for another reason.
        edge: segments that begin before this position keep what was planned without it.
    """

    private: ClassVar[bool]  # whether what it sees depends on the question

    def __init__(self, plan: Plan, bounds: Sequence[int], question: range, choose: Choose, *, edge: int = 0) -> None:
        self.plan, self._bounds, self._question, self._choose = plan, bounds, question, choose
        self._edge = edge
        self.intact_layers = 0  # in so many first ones all chunk-caches lie where they were placed for the look

    def look(
        self,
        passes: PartialPrefill,
        supply: Supply,
        positions: Sequence[int],
        *,
        rows: Mapping[int, int],
        done: Mapping[int, int],
    ) -> dict[int, int]:
        """Look, and choose.

        Args:
            positions: of `positions`, with the same rows.
            rows: position → owner (see `OverlappedPrefill`) of what the last pass would compute.
            done: the same of what earlier passes have computed.

        Returns:
            `rows` with the recomputed tokens chosen anew.
        """
        seen = self._see(passes, supply, positions, rows).cpu().numpy()
        spans = {
            index: (self._bounds[index], self._bounds[index + 1])
            for index, planned in enumerate(self.plan.segments)
            if planned.to_fix
        }
        settled = {i for i, (start, _) in spans.items() if start < self._edge}
        recomputed = {i: _offsets(span, done, lambda owner: owner >= 0) for i, span in spans.items()}
        gone = {i: _offsets(span, {**rows, **done}, lambda owner: owner < 0) for i, span in spans.items()}
        for i in settled:  # as if it had been computed already, and the rest of it were out of the question
            start, stop = spans[i]
            recomputed[i] |= _offsets((start, stop), rows, lambda owner: owner >= 0)
            gone[i] = frozenset(range(stop - start)) - recomputed[i]
        of_chunk = {i: seen[start:stop] for i, (start, stop) in spans.items() if i not in settled}
        for i, scores in of_chunk.items():
            scores[sorted(gone[i])] = 0.0  # nothing was stored there, or it did not come
        mean = max(float(np.concatenate(list(of_chunk.values())).mean()), 1e-30)
        self.plan = self._choose({i: scores / mean for i, scores in of_chunk.items()}, recomputed, gone)
        kept = {position: owner for position, owner in rows.items() if owner < 0 or owner in settled}
        for index, (start, _) in spans.items():
            fresh = set(self.plan.segments[index].recompute) - recomputed[index]
            kept.update((start + offset, index) for offset in fresh)
        return kept

    @abstractmethod
    def positions(self, rows: Mapping[int, int], done: Mapping[int, int]) -> Sequence[int]:
        """The ascending positions that it runs, to see something; arguments as in `look`."""

    @abstractmethod
    def _see(self, passes: PartialPrefill, supply: Supply, positions: Sequence[int], rows: Mapping[int, int]) -> Tensor:
        """float32 `[positions]`: more = sooner recomputed."""


class QuestionProbe(Probe):
    """Sees how much the question looks at each token in the middle layers.

    Only the question's last rows run, and only up to those layers. Chunks still to be computed are hidden from them.
    The fifth tenth of them: earlier ones choose worse, later ones cost more (docs/log.md).
    """

    private = True

    def positions(self, rows: Mapping[int, int], done: Mapping[int, int]) -> Sequence[int]:
        """See `Probe.positions`."""
        return self._question[-QUESTION_ROWS:]

    def _see(self, passes: PartialPrefill, supply: Supply, positions: Sequence[int], rows: Mapping[int, int]) -> Tensor:
        absent = sorted(position for position, owner in rows.items() if owner < 0 and position < positions[0])
        first = int(0.4 * passes.layers)
        layers = range(first, max(int(0.5 * passes.layers), first + 1))
        watcher = _Attention(layers, positions, absent)
        passes.look(positions, supply, layers=layers.stop, watcher=watcher, absent=absent)
        self.intact_layers = layers.stop
        assert watcher.received is not None, "the range of layers is never empty"
        return watcher.received


class _Attention:
    """Adds up the attention that the rows give to each key in some layers."""

    def __init__(self, layers: range, positions: Sequence[int], absent: Sequence[int]) -> None:
        self._layers, self._positions, self._absent = layers, list(positions), list(absent)
        self.received: Tensor | None = None

    def observe(self, layer: int, q: Tensor, k: Tensor, settings: AttentionSettings) -> None:
        """See `prefill.Watcher`."""
        if layer not in self._layers:
            return
        hidden = torch.tensor(self._absent, device=q.device) if self._absent else None
        positions = torch.tensor(self._positions, device=q.device)
        blocks = row_blocks(positions, window=settings.window, absent=hidden)
        own = q[-len(positions) :]  # behind rows that may have joined
        everything = torch.tensor([0, len(k)], device=q.device)
        _, received = attention_mass(
            own, k, blocks, positions, everything, scale=settings.scale, softcap=settings.softcap
        )
        self.received = received if self.received is None else self.received + received


class ValueProbe(Probe):
    """Sees how far each token's value moves in the first layer where it can (CacheBlend §4.3).

    All tokens that are not yet computed run through two layers. A chunk's token sees nothing that stands behind it, so
    the question has no say.
    """

    private = False

    def positions(self, rows: Mapping[int, int], done: Mapping[int, int]) -> Sequence[int]:
        """See `Probe.positions`."""
        exact = {
            position
            for index, planned in enumerate(self.plan.segments)
            if planned.outcome == "exact" or planned.as_captured
            for position in range(self._bounds[index], self._bounds[index + 1])
        }
        return [p for p in range(self._bounds[-1]) if p not in done and (p not in exact or p in rows)]

    def _see(self, passes: PartialPrefill, supply: Supply, positions: Sequence[int], rows: Mapping[int, int]) -> Tensor:
        remembered = _Remembered(supply)
        layers = min(_VALUE_LAYER + 1, passes.layers)
        passes.look(positions, remembered, layers=layers)
        moved = passes.merged.kv[layers - 1, 1].float() - remembered.values.float()
        return moved.square().sum((1, 2))


class _Remembered:
    """A supply that remembers one layer's values as they were placed, before anything was computed over them."""

    def __init__(self, supply: Supply) -> None:
        self._supply = supply
        self.values = torch.empty(0)

    def place(self, layer: int, merged: MergedKV) -> Sequence[int]:
        """See `prefill.Supply`."""
        late = self._supply.place(layer, merged)
        if layer <= _VALUE_LAYER:
            self.values = merged.kv[layer, 1].clone()
        return late


PROBES: Mapping[str, type[Probe]] = {"question": QuestionProbe, "values": ValueProbe}


def _offsets(span: tuple[int, int], rows: Mapping[int, int], wanted: Callable[[int], bool]) -> frozenset[int]:
    start, stop = span
    return frozenset(p - start for p in range(start, stop) if (owner := rows.get(p)) is not None and wanted(owner))
