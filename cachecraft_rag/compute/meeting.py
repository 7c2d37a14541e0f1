"""Meeting point of the two ends of an overlapped prefill, decided from measurements only.

Three things make a machine lose by computing a front, and each is counted here:

* A pass has a fixed part. The front is computed in few pieces, each half of what is left of it, and the last pass takes
  the rest along. Where a pass over everything would not take clearly longer, there is that pass.
* The first reads of a request come slower than the rest. As long as the rate is not settled, the front takes in a pass
  of its own what would pay with loading twice as fast; if nothing would pay, the last pass begins, and takes over what
  is late in its first layers, where catching up costs least.
* Readers use the cores that compute, and threads that compute together wait for the one that was interrupted. What a
  front spares must be worth it, see `_LEAST_SHARE`; and a pass beside readers that keep as many cores busy as loading
  takes time ends no sooner than one that begins when they are done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cachecraft_rag.compute.speed import ComputeSpeed
from cachecraft_rag.planning.config import Loading

_PIECE = 256  # tokens that the last pass takes along; of a longer front, half is computed in a piece of its own
_FIRST_PIECE = 64  # on a machine that has measured nothing yet
_FIRST_LOOK_S = 0.02  # at most, to wait for what may come at once, when nothing is known of how fast it comes
_FIRST_LOOK = 0.02  # and of the time that computing everything takes
_SETTLE_S = 0.1  # to wait where nothing is known of computing either
_SOON_S = 0.5  # what is loaded by then is not worth a piece that nothing is known of: it costs a pass
_SLOW_START = 2.0  # a rate that is not settled may be this many times as high: most first reads gave half of it or more
_ONE_PASS = 1.15  # one pass over everything may take this many times as long as one that readers disturb
_LEAST_SHARE, _LEAST_LATE = 0.25, 0.15  # of loading, that computing a front, or what is late in a pass, must spare
_BUSY_CORES = 0.75  # taken by readers: the pass beside them loses so much of the time that loading takes


def preload_depth(layers: int, *, prefill_s: float, load_s: float) -> int:
    """Number of layers to have before the first is computed, so that none is waited for (Cache-Craft eq. 16).

    Args:
        prefill_s, load_s: of all layers, each by itself.

    >>> preload_depth(5, prefill_s=1.0, load_s=2.0)  # Fig. 19: 4 · (1 - 1/2) + 1
    3
    >>> preload_depth(5, prefill_s=2.0, load_s=1.0)  # computing takes longer: one is enough
    1
    """
    if load_s <= prefill_s:
        return 1
    return min(layers, math.ceil((layers - 1) * (1.0 - prefill_s / load_s) + 1.0))


def tokens_to_compute(*, load_s: float, compute_s: float, load_token_s: float, compute_token_s: float) -> float:
    """Number of tokens to compute instead of loading so that both end at the same moment; negative: none.

    Args:
        load_s, compute_s: time that each still takes as it stands.
        load_token_s, compute_token_s: time per token on either side.

    >>> tokens_to_compute(load_s=3.0, compute_s=1.0, load_token_s=0.03, compute_token_s=0.01)  # 3 - .03 n = 1 + .01 n
    50.0
    """
    return (load_s - compute_s) / (load_token_s + compute_token_s)


@dataclass(frozen=True, slots=True)
class BothEnds:
    """State of both ends when the number of tokens for the front is decided.

    waiting      positions that are still to be loaded, ascending
    bytes_left   of them
    bytes_per_s  at which they come just now, or can come at most; 0 = nothing was asked for yet
    settled      the rate can be relied on
    rows         what the last pass computes in any case, see `ComputeSpeed.rows`
    own          positions of those; where they are waited for as well, a front takes them at no cost
    cores        that readers keep busy and computing lacks
    tokens       of the whole prompt
    borders      how many of `waiting` stand before the end of each extent: what is left of one is loaded as a whole
    came         something has come; else the rate is the highest that is possible
    """

    waiting: Sequence[int]
    bytes_left: float
    bytes_per_s: float
    settled: bool
    rows: float
    speed: ComputeSpeed
    own: Sequence[int] | NDArray[np.int64] = ()
    cores: float = 0.0
    tokens: int = 0
    borders: Sequence[int] = ()
    came: bool = True

    def next_piece(self) -> tuple[float, bool]:
        """Number of tokens that the front takes next; True if the last pass takes them along."""
        if not self.waiting:
            return 0.0, True
        if not self.speed.known:
            return (0.0, True) if self.comes_soon else (_FIRST_PIECE, False)
        if self.bytes_per_s <= 0.0 and not self.settled:
            return min(_FIRST_PIECE, len(self.waiting)), False
        possible, likely = self.possible(), self if self.came else self._at(1.0 / _SLOW_START)
        if self.bytes_per_s > 0.0 and self.rest_s() <= min(possible.load_s, _ONE_PASS * likely._front_s()):
            return float(len(self.waiting)), True
        share = possible.share()
        if not self.settled:
            return share, share == 0.0
        return (share, True) if share <= _PIECE else (self._whole_extents(share / 2) or share, False)

    @property
    def comes_soon(self) -> bool:
        """True if everything will be there so soon that nothing else need be known."""
        return self.bytes_left <= _SOON_S * self.bytes_per_s

    @property
    def untouched(self) -> bool:
        """True if nothing of the prompt is computed or loaded yet."""
        return len(np.union1d(self.own, self.waiting)) == self.tokens

    def load_first(self) -> bool:
        """True if everything should be there before the last pass: running it beside the readers would win nothing."""
        if not self.waiting or not self.speed.known or self.bytes_per_s <= 0.0:
            return False
        return self.cores >= _BUSY_CORES and self.share() == 0.0

    @property
    def load_s(self) -> float:
        """Seconds that loading will still take, at a rate above 0."""
        return self.bytes_left / self.bytes_per_s

    def share(self, *, layers_left: float = 1.0) -> float:
        """Tokens for the front, so that both ends are done at the same moment.

        Args:
            layers_left: the part of the layers whose loading it still spares.
        """
        count = len(self.waiting)
        if not count or self.bytes_per_s <= 0.0:
            return float(count)
        if self.bytes_left <= 0.0:
            return 0.0
        share = self._meeting(layers_left, _PIECE)
        if share > _PIECE:  # later tokens attend to more keys
            share = self._meeting(layers_left, _PIECE * round(share / _PIECE))
        # Where a token loads k times as fast as it is computed, the front spares at most 1 / (k + 1) of the loading; a
        # rate that was misjudged, or readers that decode on the same cores, cost k times what is spared. Once a layer
        # has run, it is known what is late, and less is enough.
        least = _LEAST_SHARE if layers_left == 1.0 else _LEAST_LATE
        return self._whole_extents(share, layers_left) if share >= least * count else 0.0

    def _whole_extents(self, share: float, layers_left: float = 1.0) -> float:
        """The border of an extent before or behind `share`, whichever loses less time."""
        if self.bytes_per_s <= 0.0:
            return share
        before = max((float(one) for one in self.borders if one <= share), default=0.0)
        behind = min((float(one) for one in self.borders if one > share), default=share)
        loaded_s = (share - before) * self.load_token_s * layers_left
        return behind if (behind - share) * self._token_s(_PIECE) <= loaded_s else before

    def _meeting(self, layers_left: float, ahead: int) -> float:
        """Tokens, where computing one takes as long as one of the next `ahead` does on average."""
        share = tokens_to_compute(
            load_s=self.load_s,
            compute_s=self.speed.seconds(self.rows),
            load_token_s=self.load_token_s * layers_left,
            compute_token_s=self._token_s(ahead),
        )
        return min(max(share, 0.0), float(len(self.waiting)))

    @property
    def load_token_s(self) -> float:
        """Seconds of loading a token, on average, where any are waited for."""
        return self.load_s / len(self.waiting)

    def _token_s(self, ahead: int) -> float:
        """Seconds of computing one of the next `ahead` tokens, on average."""
        front = self.waiting[:ahead]
        return self.speed.seconds(self._more(front), passes=0) / len(front)

    def rest_s(self) -> float:
        """Seconds for computing all that is left in one pass."""
        rows = self.rows + self._more(self.waiting)
        return self.speed.whole_s(rows) if self.untouched else self.speed.seconds(rows)

    def _front_s(self) -> float:
        """Seconds of computing the front and what the last pass computes in any case."""
        return self.speed.seconds(self.rows + self._more(self.waiting[: round(self.share())]))

    def _more(self, front: Sequence[int]) -> float:
        """Rows that computing these positions adds to those of the last pass."""
        return self.speed.rows(np.setdiff1d(np.asarray(front, dtype=np.int64), self.own, assume_unique=True))

    def possible(self) -> BothEnds:
        """The same at the highest rate that is possible."""
        return self if self.settled or not self.came else self._at(_SLOW_START)

    def _at(self, factor: float) -> BothEnds:
        return replace(self, bytes_per_s=self.bytes_per_s * factor)


@dataclass(frozen=True, slots=True)
class Ahead:
    """Condition to wait for before the next pass.

    enough       "nothing"; "all" that is to be loaded; "all soon": until all will be there soon; or a number of layers
    timeout_s    None = no limit
    layer_first  load layer by layer from now on
    """

    enough: Literal["nothing", "all", "all soon"] | int
    timeout_s: float | None = None
    layer_first: bool = False


class LayerWise:
    """Load each layer ahead of its use, and compute nothing that is stored (Cache-Craft, Algorithm 2).

    Attributes:
        computes_front: stored tokens may be computed instead of loaded.
    """

    computes_front = False

    def first_look(self, ends: BothEnds) -> Ahead:
        """Condition to wait for before anything is decided."""
        return Ahead("nothing")

    def ahead(self, ends: BothEnds, layers: int) -> Ahead:
        """Condition to wait for before the next pass: as many layers as it takes to compute without a gap (eq. 16)."""
        prefill_s = ends.speed.seconds(ends.rows) if ends.speed.known else 0.0
        load_s = ends.load_s if ends.bytes_per_s > 0.0 else 0.0
        return Ahead(preload_depth(layers, prefill_s=prefill_s, load_s=load_s))

    def next_piece(self, ends: BothEnds) -> tuple[float, bool]:
        """Tokens that the front takes next; True if the last pass takes them along."""
        return 0.0, True


class Whole(LayerWise):
    """Load everything, then compute."""

    def ahead(self, ends: BothEnds, layers: int) -> Ahead:
        """Condition to wait for before the next pass."""
        return Ahead("all")


class Cake(LayerWise):
    """Load from the back while the front is computed."""

    computes_front = True

    def first_look(self, ends: BothEnds) -> Ahead:
        """Condition to wait for before anything is decided: where the rate is unknown, everything may come at once."""
        if ends.settled:
            return Ahead("nothing")
        everything_s = ends.rest_s() if ends.speed.known else math.inf
        return Ahead("all", min(_FIRST_LOOK_S, _FIRST_LOOK * everything_s))

    def ahead(self, ends: BothEnds, layers: int) -> Ahead:
        """Condition to wait for before the next pass."""
        if not (ends.speed.known or ends.settled):
            return Ahead("all soon", _SETTLE_S)
        if ends.load_first():
            return Ahead("all", 2.0 * ends.load_s, layer_first=True)
        return Ahead("nothing")

    def next_piece(self, ends: BothEnds) -> tuple[float, bool]:
        """Tokens that the front takes next; True if the last pass takes them along."""
        return ends.next_piece()


RULES: Mapping[Loading, LayerWise] = MappingProxyType({"cake": Cake(), "layerwise": LayerWise(), "whole": Whole()})
