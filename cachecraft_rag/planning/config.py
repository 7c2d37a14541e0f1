"""Settings of one engine and of one answer: frozen, validated when made, unknown names refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from cachecraft_rag.checks import (
    FINITE,
    MOST,
    check_choice,
    check_flag,
    check_kind,
    check_number,
    check_text,
    check_whole,
    shown,
)
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.selectors import BudgetScope, selector_named

DEFAULT_ALPHA = 0.25


Loading = Literal["cake", "layerwise", "whole"]
Focus = Literal["off", "printed", "gap", "share"]
Scope = Literal["anywhere", "prefix", "set"]
Part = Literal["overlap", "positions"]


def _once(name: str, given: object) -> tuple[object, ...]:
    """What was given, which a generator gives only once; a single text is a mistake."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        raise ConfigError(f"{name} must be a sequence of strings, not {shown(given)}: write {name}=('…',)")
    return tuple(given)


@dataclass(frozen=True, slots=True)
class ReuseConfig:
    """How chunk-caches are reused.

    reuse            False computes every prompt in full (and still records captures unless `captures` is off)
    captures           store newly computed chunk-caches
    scope            where a chunk-cache may serve: "anywhere" (Cache-Craft); "prefix", only behind the very prefix it
                     was captured behind (PREFIX-CACHE, exact); "set", behind the same chunks in any order, nothing
                     recomputed (SET-CACHE, both of Cache-Craft §5.1.4)
    alpha            α of eq. 12. None = as `cachecraft calibrate` found it for this model and store, or else
                     DEFAULT_ALPHA: a chunk whose old neighbours are all gone recomputes some 15 % of its tokens
    recompute_ratio  a fixed share of every inexact chunk's tokens instead of CFO's; None = CFO decides. With a ratio α
                     plays no part: CFO, at DEFAULT_ALPHA, only says which variant of a chunk is the best, and no chunk
                     is computed because fixing it would cost as much
    selector         which tokens those are, a name of `selection.SELECTORS`
    probe_min_rows       so many rows must be computed for a selector's probe to go ahead of it; with fewer the
                     selector does without: reading half of the weights once more would take too much of the time
    budget_scope          whether each chunk keeps to its own budget ("chunk", as in the paper) or all are put together and
                     go to the best tokens of the whole prompt ("shared")
    drift            how far the other tokens of a chunk follow the mean change of its recomputed ones, see `drift`;
                     0 = not at all, as in the paper
    focus            early termination of unfocused chunks: "off", "printed" (Algorithm 1 as printed), "gap" (mended) or
                     "share" (a threshold on the attention share)
    early_termination_window     w of Algorithm 1
    loading          what is not in memory: "cake" loads from the back while the front is computed; "layerwise" computes
                     nothing that is stored, and loads ahead of the layer that needs it; "whole" loads, then computes
    without          parts of the method to leave out, for ablations: "overlap" (β′ counts as 0, eq. 12) or
                     "positions" (keys of reused chunks in memory stay as they are right behind the instruction)
    sink_tokens      so many first tokens of the prompt are left out of every attention sum: they are attention sinks
    """

    reuse: bool = True
    captures: bool = True
    scope: Scope = "anywhere"
    alpha: float | None = None
    recompute_ratio: float | None = None
    selector: str = "question"
    probe_min_rows: int = 128
    budget_scope: BudgetScope = "shared"
    drift: float = 0.4
    focus: Focus = "off"
    early_termination_window: int = 3
    loading: Loading = "cake"
    without: frozenset[Part] = frozenset()
    sink_tokens: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "without", _once("without", self.without))
        """Check every field; raises ConfigError."""
        check_flag("reuse", self.reuse)
        check_flag("captures", self.captures)
        check_choice("scope", self.scope, get_args(Scope))
        check_number("alpha", self.alpha, most=FINITE, optional=True)
        check_number("recompute_ratio", self.recompute_ratio, most=1, optional=True)
        check_text("selector", self.selector)
        selector_named(self.selector)
        check_whole("probe_min_rows", self.probe_min_rows)
        check_choice("budget_scope", self.budget_scope, get_args(BudgetScope))
        check_number("drift", self.drift, most=1)
        check_choice("focus", self.focus, get_args(Focus))
        check_whole("early_termination_window", self.early_termination_window, least=1)
        check_choice("loading", self.loading, get_args(Loading))
        for part in self.without:
            check_choice("without", part, get_args(Part))
        object.__setattr__(self, "without", frozenset(self.without))
        check_whole("sink_tokens", self.sink_tokens)


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
        object.__setattr__(self, "stop", _once("stop", self.stop))
        """Check every field; raises ConfigError."""
        check_whole("max_new_tokens", self.max_new_tokens, least=1)
        check_number("temperature", self.temperature, most=FINITE)
        check_number("top_p", self.top_p, above=True, most=1)
        check_whole("seed", self.seed, least=-MOST - 1, optional=True)
        for text in self.stop:
            check_text("each text of stop", text, empty=False)


def check_engine(*, namespace: object, reuse: object, system: object) -> None:
    """What every engine is made with; raises ConfigError."""
    check_text("namespace", namespace)
    check_kind("reuse", reuse, ReuseConfig, optional=True, advice="write ReuseConfig(reuse=False) to switch it off")
    check_text("system", system)
