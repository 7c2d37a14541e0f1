"""Split of a prompt between computing and loading, decided from measurements only.

The front of the prompt is computed while the rest is loaded from its end. Computing a front can also lose time, for
three reasons that the decisions here take into account:

* A pass has a fixed cost. So the front is computed in few pieces, each half of what is left of it, and the last pass
  includes the rest. If one pass over everything does not take clearly longer, everything is computed in that pass.
* The first reads of a request are slower than later ones. Until the rate is settled, the front includes only what
  would pay off at a higher rate. If nothing would, the last pass begins, and computes late tokens in its first layers,
  where catching up costs least.
* Readers use the cores that compute, and threads that compute together wait for an interrupted one. So a front must
  save a minimum share of the loading time, and a pass that competes with busy readers starts after they finish.

docs/decisions/loading-constants.md says what each of the constants contributes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.planning.config import Loading


@dataclass(frozen=True, slots=True)
class LoadingConstants:
    """Tuned constants of overlapped prefill; their effects are in docs/decisions/loading-constants.md.

    piece_tokens         largest front, in tokens, that the last pass includes; half of a longer one is computed first
    first_piece_tokens   size in tokens of a piece when the speed of computing or loading is unknown
    first_look_s         longest wait, in seconds, for the first reads of a store whose rate is unknown
    first_look_fraction  the same, as a fraction of the time to compute the whole prompt; the shorter wait counts
    settle_s             longest wait, in seconds, if the speed of computing is unknown too
    soon_s               remaining load time, in seconds, below which nothing is computed while the speed of computing
                         is unknown, because a pass would cost more
    optimism             factor by which an unsettled rate may still rise; most first reads reached half of the final
                         rate or more
    one_pass_factor      largest duration of one pass over everything, relative to computing the split's front in all
                         its passes, for which this single pass is preferred
    min_saving           smallest saving from computing a front, as a fraction of the tokens to load
    min_saving_in_pass   the same for late tokens within a pass, whose number is known by then
    busy_cores           number of cores busy with reading from which a pass loses time to them
    patience_s           grace period for a late layer, in seconds
    stall_s              time without progress, in seconds, after which missing tokens are computed
    """

    piece_tokens: int = 256
    first_piece_tokens: int = 64
    first_look_s: float = 0.02
    first_look_fraction: float = 0.02
    settle_s: float = 0.1
    soon_s: float = 0.5
    optimism: float = 2.0
    one_pass_factor: float = 1.05
    min_saving: float = 0.25
    min_saving_in_pass: float = 0.15
    busy_cores: float = 0.75
    patience_s: float = 0.005
    stall_s: float = 0.25


LOADING_CONSTANTS = LoadingConstants()


def preload_depth(layers: int, *, prefill_s: float, load_s: float) -> int:
    """Return how many of the `layers`, at least 1, to load before computing, which then has no gap (eq. 16).

    >>> preload_depth(5, prefill_s=1.0, load_s=2.0)  # Fig. 19: 4 · (1 - 1/2) + 1
    3
    >>> preload_depth(5, prefill_s=2.0, load_s=1.0)  # computing takes longer: one is enough
    1
    """
    if load_s <= prefill_s:
        return 1
    return min(layers, math.ceil((layers - 1) * (1.0 - prefill_s / load_s) + 1.0))


def tokens_to_compute(
    *, load_s: float, compute_s: float, load_token_s: float, compute_token_s: float
) -> float:
    """Return how many tokens to compute instead of loading, so that both finish together; may be a fraction.

    `load_s` and `compute_s` are what remains without them. Negative if loading ends first anyway.

    >>> tokens_to_compute(load_s=3.0, compute_s=1.0, load_token_s=0.03, compute_token_s=0.01)  # 3 - .03 n = 1 + .01 n
    50.0
    """
    return (load_s - compute_s) / (load_token_s + compute_token_s)


@dataclass(frozen=True, slots=True)
class LoadSplit:
    """State of computing and loading from which the split of a prompt is decided.

    waiting        positions still to be loaded, ascending
    bytes_left     bytes still to be loaded
    bytes_per_s    current rate of loading, or the highest possible one before any data; 0 = nothing was requested yet
    is_settled     True if the rate is reliable
    rows           cost of the rows that the last pass computes in any case, see `ComputeSpeed.rows`
    speed          speed of computing
    own_positions  positions of these rows; if they are also waited for, a front includes them at no cost
    busy_cores     cores that readers keep busy and that computing lacks
    tokens         number of tokens in the prompt
    extent_ends    number of `waiting` positions before the end of each extent, because extents are loaded whole
    has_loaded     True if any data has been loaded; otherwise the rate is an upper bound
    constants      the tuned constants
    """

    waiting: Sequence[int]
    bytes_left: float
    bytes_per_s: float
    is_settled: bool
    rows: float
    speed: ComputeSpeed
    own_positions: Sequence[int] | NDArray[np.int64] = ()
    busy_cores: float = 0.0
    tokens: int = 0
    extent_ends: Sequence[int] = ()
    has_loaded: bool = True
    constants: LoadingConstants = LOADING_CONSTANTS

    def next_piece(self) -> tuple[float, bool]:
        """Return the number of tokens in the next piece of the front, and True if the last pass includes them.

        False means that a separate pass computes the piece first; then the next piece is decided. The number may be a
        fraction, and exceed that of the waiting tokens while the speed of computing is unknown. (0.0, True) means that
        the last pass is next and that no token is computed instead of loaded.
        """
        if not self.waiting:
            return 0.0, True
        first_piece = self.constants.first_piece_tokens
        if not self.speed.known:
            return (0.0, True) if self.loads_soon else (first_piece, False)
        if self.bytes_per_s <= 0.0 and not self.is_settled:
            return min(first_piece, len(self.waiting)), False

        optimistic = self.optimistic()
        if self.bytes_per_s > 0.0:
            expected = self if self.has_loaded else self._at(1.0 / self.constants.optimism)
            longest_pass_s = min(
                optimistic.load_s, self.constants.one_pass_factor * expected._front_s()
            )
            if self.rest_s() <= longest_pass_s:
                return float(len(self.waiting)), True

        share = optimistic.share()
        if not self.is_settled:
            return share, share == 0.0
        if share <= self.constants.piece_tokens:
            return share, True
        return self._whole_extents(share / 2) or share, False

    @property
    def loads_soon(self) -> bool:
        """True if loading ends within `soon_s` seconds at this rate, so that computing need not be considered."""
        return self.bytes_left <= self.constants.soon_s * self.bytes_per_s

    @property
    def is_untouched(self) -> bool:
        """True if no token of the prompt is computed or loaded yet: each is among `waiting` or `own_positions`."""
        return len(np.union1d(self.own_positions, self.waiting)) == self.tokens

    def load_first(self) -> bool:
        """Return True if loading goes first: at known speeds no front pays off, and readers would slow the pass."""
        if not self.waiting or not self.speed.known or self.bytes_per_s <= 0.0:
            return False
        return self.busy_cores >= self.constants.busy_cores and self.share() == 0.0

    @property
    def load_s(self) -> float:
        """Remaining seconds of loading at the current rate, which must not be 0; 0.0 without bytes left."""
        return self.bytes_left / self.bytes_per_s

    def share(self, *, layers_left: float = 1.0) -> float:
        """Return how many tokens the front should have, so that computing and loading finish together.

        `layers_left` is the fraction of the layers whose loading the front still saves. The result is all waiting
        tokens for a rate of 0 (otherwise the speed must be `known`), and 0.0 if computing a front would save too
        little, or its first extent takes more time to compute than it saves. Otherwise it reaches to the end of an
        extent, or is a fraction after the last end in `extent_ends`.
        """
        count = len(self.waiting)
        if not count or self.bytes_per_s <= 0.0:
            return float(count)
        if self.bytes_left <= 0.0:
            return 0.0

        piece_tokens = self.constants.piece_tokens
        share = self._balanced_share(layers_left, piece_tokens)
        if share > piece_tokens:  # later tokens attend to more keys
            share = self._balanced_share(layers_left, piece_tokens * round(share / piece_tokens))

        # If a token loads k times as fast as it is computed, a front saves at most 1 / (k + 1) of the loading. A wrong
        # rate, or readers on the same cores, cost k times the saving. After the first layer the late tokens are known,
        # and a smaller saving suffices.
        is_before_pass = layers_left == 1.0
        min_saving = (
            self.constants.min_saving if is_before_pass else self.constants.min_saving_in_pass
        )
        if share < min_saving * count:
            return 0.0
        return self._whole_extents(share, layers_left)

    def _whole_extents(self, share: float, layers_left: float = 1.0) -> float:
        """Return the end of an extent before or after `share`, whichever costs less time."""
        if self.bytes_per_s <= 0.0:
            return share
        before = max((float(end) for end in self.extent_ends if end <= share), default=0.0)
        after = min((float(end) for end in self.extent_ends if end > share), default=share)
        loading_s = (share - before) * self.load_token_s * layers_left
        computing_s = (after - share) * self._token_s(self.constants.piece_tokens)
        return after if computing_s <= loading_s else before

    def _balanced_share(self, layers_left: float, front_tokens: int) -> float:
        """Return the balanced number of tokens, at the mean cost of the next `front_tokens` tokens."""
        share = tokens_to_compute(
            load_s=self.load_s,
            compute_s=self.speed.seconds(self.rows),
            load_token_s=self.load_token_s * layers_left,
            compute_token_s=self._token_s(front_tokens),
        )
        return min(max(share, 0.0), float(len(self.waiting)))

    @property
    def load_token_s(self) -> float:
        """Mean seconds to load a waiting token, of which there must be one; the rate must not be 0."""
        return self.load_s / len(self.waiting)

    def _token_s(self, front_tokens: int) -> float:
        """Return the mean seconds to compute one of the next `front_tokens` tokens."""
        front = self.waiting[:front_tokens]
        return self.speed.seconds(self._extra_rows(front), passes=0) / len(front)

    def rest_s(self) -> float:
        """Return the seconds to compute all that is left in one pass, at a known speed: `rows` and `waiting`."""
        rows = self.rows + self._extra_rows(self.waiting)
        return self.speed.whole_s(rows) if self.is_untouched else self.speed.seconds(rows)

    def _front_s(self) -> float:
        """Return the seconds to compute the front, piece by piece, and the rows that the last pass computes anyway."""
        share = self.share()
        rows = self.rows + self._extra_rows(self.waiting[: round(share)])
        halvings = math.ceil(math.log2(max(1.0, share / self.constants.piece_tokens)))
        return self.speed.seconds(rows, passes=1 + halvings)

    def _extra_rows(self, front: Sequence[int]) -> float:
        """Return the cost of rows that computing these positions adds to the last pass."""
        added = np.setdiff1d(
            np.asarray(front, dtype=np.int64), self.own_positions, assume_unique=True
        )
        return self.speed.rows(added)

    def optimistic(self) -> LoadSplit:
        """Return the state at the highest rate that loading may still reach; itself if settled or before any data."""
        if self.is_settled or not self.has_loaded:
            return self
        return self._at(self.constants.optimism)

    def _at(self, factor: float) -> LoadSplit:
        return replace(self, bytes_per_s=self.bytes_per_s * factor)


@dataclass(frozen=True, slots=True)
class WaitCondition:
    """Condition to wait for before the next pass.

    enough       "nothing"; "all": everything is loaded; "all soon": everything will be loaded soon; or the number of
                 first layers that must be loaded
    timeout_s    longest wait in seconds; None = no limit
    layer_first  load layer by layer from now on
    """

    enough: Literal["nothing", "all", "all soon"] | int
    timeout_s: float | None = None
    layer_first: bool = False


class LayerWise:
    """Load each layer before it is used, and compute nothing that is stored (Cache-Craft, Algorithm 2).

    Attributes:
        computes_front: True if passes before the last one, too, may compute stored tokens instead of loading them.
    """

    computes_front = False

    def first_look(self, split: LoadSplit) -> WaitCondition:
        """Return the condition to wait for before the first decision: "nothing", without a limit of time."""
        return WaitCondition("nothing")

    def before_pass(self, split: LoadSplit, layers: int) -> WaitCondition:
        """Return the condition of a pass: enough layers to compute without a gap (eq. 16; unknown times are 0)."""
        prefill_s = split.speed.seconds(split.rows) if split.speed.known else 0.0
        load_s = split.load_s if split.bytes_per_s > 0.0 else 0.0
        return WaitCondition(preload_depth(layers, prefill_s=prefill_s, load_s=load_s))

    def next_piece(self, split: LoadSplit) -> tuple[float, bool]:
        """Return (0.0, True): no token is computed instead of loaded, and the last pass is next."""
        return 0.0, True


class Whole(LayerWise):
    """Load everything, then compute."""

    def before_pass(self, split: LoadSplit, layers: int) -> WaitCondition:
        """Return the condition to wait for before the next pass: "all", that is everything, without a limit of time."""
        return WaitCondition("all")


class Cake(LayerWise):
    """Load from the end of the prompt while its front is computed."""

    computes_front = True

    def first_look(self, split: LoadSplit) -> WaitCondition:
        """Return the condition of the first decision: nothing if the rate is settled, otherwise all.

        The wait lasts at most `first_look_s`, and at most `first_look_fraction` of the time to compute all that is
        left, if the speed of computing is known.
        """
        if split.is_settled:
            return WaitCondition("nothing")
        everything_s = split.rest_s() if split.speed.known else math.inf
        constants = split.constants
        return WaitCondition(
            "all", min(constants.first_look_s, constants.first_look_fraction * everything_s)
        )

    def before_pass(self, split: LoadSplit, layers: int) -> WaitCondition:
        """Return the condition of the next pass.

        "all soon", at most `settle_s`, if neither speed is known; "all", layer by layer and at most twice
        `LoadSplit.load_s`, if `LoadSplit.load_first`; otherwise "nothing".
        """
        if not (split.speed.known or split.is_settled):
            return WaitCondition("all soon", split.constants.settle_s)
        if split.load_first():
            return WaitCondition("all", 2.0 * split.load_s, layer_first=True)
        return WaitCondition("nothing")

    def next_piece(self, split: LoadSplit) -> tuple[float, bool]:
        """Same as `LoadSplit.next_piece`."""
        return split.next_piece()


class FrontInLastPass(LayerWise):
    """Compute a front within the last pass, decided once, and load the rest layer by layer: Cake for several ranks.

    Nothing stored is computed while the speed of computing or loading is unknown.
    """

    def before_pass(self, split: LoadSplit, layers: int) -> WaitCondition:
        """Return the condition of the pass: "nothing" if it computes a front, otherwise that of layer-wise loading."""
        front, _ = self.next_piece(split)
        return WaitCondition("nothing") if front else super().before_pass(split, layers)

    def next_piece(self, split: LoadSplit) -> tuple[float, bool]:
        """Return the number of tokens in the front, maybe a fraction, and True."""
        if not (split.speed.known and split.is_settled and split.bytes_per_s > 0.0):
            return 0.0, True
        tokens, is_last = split.next_piece()
        return tokens if is_last else split.share(), True


STRATEGIES: Mapping[Loading, LayerWise] = MappingProxyType(
    {"cake": Cake(), "layerwise": LayerWise(), "whole": Whole()}
)
