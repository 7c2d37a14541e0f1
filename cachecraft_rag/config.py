"""Settings of one engine and of one answer: frozen, validated when made, unknown names refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.selection import Sharing, selector_named

DEFAULT_ALPHA = 0.25


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


Loading = Literal["cake", "layerwise", "whole"]
Focus = Literal["off", "printed", "gap", "share"]
Scope = Literal["anywhere", "prefix", "set"]
Part = Literal["overlap", "positions"]


@dataclass(frozen=True, slots=True)
class ReuseConfig:
    """How chunk-caches are reused.

    reuse            False computes every prompt in full (and still records births unless `births` is off)
    births           store newly computed chunk-caches
    scope            where a chunk-cache may serve: "anywhere" (Cache-Craft); "prefix", only behind the very prefix it
                     was born behind (PREFIX-CACHE, exact); "set", behind the same chunks in any order, nothing
                     recomputed (SET-CACHE, both of Cache-Craft §5.1.4)
    alpha            α of eq. 12. None = as `cachecraft calibrate` found it for this model and store, or else
                     DEFAULT_ALPHA: a chunk whose old neighbours are all gone recomputes some 15 % of its tokens
    recompute_ratio  a fixed share of every inexact chunk's tokens instead of CFO's; None = CFO decides. With a ratio α
                     plays no part: CFO, at DEFAULT_ALPHA, only says which variant of a chunk is the best, and no chunk
                     is computed because fixing it would cost as much
    selector         which tokens those are, a name of `selection.SELECTORS`
    scout_from       so many rows must be computed for a selector's scout to go ahead of it; with fewer the
                     selector does without: reading half of the weights once more would take too much of the time
    sharing          whether each chunk keeps to its own budget ("chunk", as in the paper) or all are put together and
                     go to the best tokens of the whole prompt ("shared")
    drift            how far the other tokens of a chunk follow the mean change of its recomputed ones, see `drift`;
                     0 = not at all, as in the paper
    focus            early termination of unfocused chunks: "off", "printed" (Algorithm 1 as printed), "gap" (mended) or
                     "share" (a threshold on the attention share)
    focus_window     w of Algorithm 1
    loading          what is not in memory: "cake" loads from the back while the front is computed; "layerwise" computes
                     nothing that is stored, and loads ahead of the layer that needs it; "whole" loads, then computes
    without          parts of the method to leave out, for ablations: "overlap" (β′ counts as 0, eq. 12) or
                     "positions" (keys of reused chunks in memory stay as they are right behind the instruction)
    sink_tokens      so many first tokens of the prompt are left out of every attention sum: they are attention sinks
    """

    reuse: bool = True
    births: bool = True
    scope: Scope = "anywhere"
    alpha: float | None = None
    recompute_ratio: float | None = None
    selector: str = "question"
    scout_from: int = 128
    sharing: Sharing = "shared"
    drift: float = 0.4
    focus: Focus = "off"
    focus_window: int = 3
    loading: Loading = "cake"
    without: frozenset[Part] = frozenset()
    sink_tokens: int = 4

    def __post_init__(self) -> None:
        alpha = self.alpha
        _require(alpha is None or 0 <= alpha < math.inf, f"alpha must be 0 or more and finite, not {alpha}")
        ratio = self.recompute_ratio
        _require(ratio is None or 0 <= ratio <= 1, f"recompute_ratio must lie between 0 and 1, not {ratio}")
        _require(self.focus in get_args(Focus), f"focus must be off, printed, gap or share, not {self.focus!r}")
        _require(self.scope in get_args(Scope), f"scope must be anywhere, prefix or set, not {self.scope!r}")
        _require(self.scout_from >= 0, f"scout_from must be 0 or more, not {self.scout_from}")
        _require(self.sharing in get_args(Sharing), f"sharing must be chunk or shared, not {self.sharing!r}")
        _require(0 <= self.drift <= 1, f"drift must lie between 0 and 1, not {self.drift}")
        _require(self.focus_window >= 1, f"focus_window must be 1 or more, not {self.focus_window}")
        object.__setattr__(self, "without", frozenset(self.without))
        known = get_args(Loading)
        _require(self.loading in known, f"loading must be one of {', '.join(known)}, not {self.loading!r}")
        _require(self.without <= set(get_args(Part)), f"without may name overlap and positions, not {self.without}")
        _require(self.sink_tokens >= 0, f"sink_tokens must be 0 or more, not {self.sink_tokens}")
        selector_named(self.selector)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the answer's tokens are drawn.

    max_new_tokens  at most so many
    temperature     0 = greedy
    top_p           nucleus: the smallest set of tokens with at least this probability
    seed            of the draw; None = a new one each time
    stop            strings that end the answer and are not part of it
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        stop = self.stop
        _require(not isinstance(stop, str), "stop must be a sequence of strings, not one string: write stop=('…',)")
        object.__setattr__(self, "stop", tuple(stop))  # a generator gives them only once
        _require(self.max_new_tokens >= 1, f"max_new_tokens must be 1 or more, not {self.max_new_tokens}")
        _require(self.temperature >= 0, f"temperature must be 0 or more, not {self.temperature}")
        _require(0 < self.top_p <= 1, f"top_p must lie above 0 and at most at 1, not {self.top_p}")
        _require(all(self.stop), "stop must not hold an empty string")
