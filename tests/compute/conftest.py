"""Parts that tests of computing share: loads that lose positions half-way, and a model on other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cachecraft_rag.compute.stack import Ranks
    from cachecraft_rag.model.decoder import Decoder
    from cachecraft_rag.store.loading.pending import PendingLoads


@pytest.fixture
def losing() -> Callable[..., PendingLoads]:
    """Makes loads that have everything, until some positions fail just before one layer.

    `losing(loads, late, before=2, spoilt=7.0)`: `loads` tells once, before layer 2, that the positions `late` did not
    come, and overwrites what was placed there in that layer and later ones.
    """
    from cachecraft_rag.store.loading.pending import KVSink, PendingLoads

    class Losing(PendingLoads):
        late: Sequence[int]
        before: int
        spoilt: float
        placed_layers = 0
        asked = reported = False

        def depth(self) -> int:
            # by a pass that stands before a layer: decisions before it do not ask in this way
            self.asked = True
            return super().depth()

        def failed(self) -> list[int]:
            if self.reported or not self.asked or self.placed_layers < self.before:
                return super().failed()
            self.reported = True
            return sorted({*super().failed(), *self.late})

        def place(self, layer: int, sink: KVSink, *, below: int | None = None) -> None:
            super().place(layer, sink, below=below)
            self.placed_layers += 1
            if layer >= self.before:
                sink.kv[layer, :, list(self.late)] = self.spoilt  # type: ignore[attr-defined]

    def make(
        loads: PendingLoads, late: Sequence[int], *, before: int, spoilt: float
    ) -> PendingLoads:
        made = Losing(loads.layers, loads.extents, loads.meter)
        made.late, made.before, made.spoilt = late, before, spoilt
        return made

    return make


@pytest.fixture
def on_ranks() -> Callable[[Decoder, Ranks], Decoder]:
    """`on_ranks(decoder, ranks)`: the same model where other ranks are asked."""

    def make(decoder: Decoder, ranks: Ranks) -> Decoder:
        other = copy.copy(decoder)
        other.ranks = ranks
        return other

    return make


@pytest.fixture
def memory_holds(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`memory_holds(nan)`: that is what a request's buffer holds before anything is written to it."""
    from cachecraft_rag.kernels.memory import Recycler

    fresh = Recycler.empty
    return lambda value: monkeypatch.setattr(
        Recycler, "empty", lambda *asked: fresh(*asked).fill_(value)
    )
