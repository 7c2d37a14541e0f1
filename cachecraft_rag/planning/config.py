"""Settings of reuse, as a frozen dataclass that is validated when it is created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

from cachecraft_rag.checks import (
    FINITE,
    check_choice,
    check_flag,
    check_kind,
    check_mapping,
    check_names,
    check_number,
    check_text,
    check_whole,
    refuses_other_names,
)
from cachecraft_rag.planning.early_termination import EarlyTerminationRule
from cachecraft_rag.planning.selectors import BudgetScope, selector_named

# of each chunk in a new context, unless CFO decides (docs/decisions/recomputed-rows.md)
DEFAULT_RATIO = 0.2
# α of eq. 12 where CFO decides or ranks variants, and none is given: about 15 % of a chunk's tokens
DEFAULT_ALPHA = 0.25

PlainPromptsMode = Literal["off", "reuse"]
Loading = Literal["cake", "layerwise", "whole"]
Scope = Literal["anywhere", "prefix", "set"]
Scoring = Literal["corrected", "published"]


@refuses_other_names(what="setting of method")
@dataclass(frozen=True, slots=True)
class ReuseMethod:
    """The method of reuse. Change it only to compare or tune methods.

    scope            contexts in which a chunk-cache may be reused. "anywhere": at any position after any chunks
                     (Cache-Craft). "prefix": after its origin prefix only (the exact baseline PREFIX-CACHE of
                     Cache-Craft §5.1.4). "set": after the chunks of its origin prefix in any order, without
                     recomputation unless `recompute_ratio` is set (the baseline SET-CACHE of §5.1.4)
    alpha            factor of CFO (α of equation 12), which then decides how much of each chunk is recomputed, unless
                     `recompute_ratio` does: then CFO at `DEFAULT_ALPHA` only ranks the variants of a chunk. None = the
                     value that `cachecraft calibrate` found for this model and store; without one every chunk has the
                     same ratio, or with "published" scoring CFO has `DEFAULT_ALPHA`
    scoring          how the variants of a chunk are scored. "published": CFO as printed (eq. 12), and the variant with
                     the lowest CFO is reused. "corrected": of the overlap β′ of an inexact capture only its exact share
                     counts, and to compare variants CFO is weighted, less for a variant that was primed and more for
                     one that was captured after the instruction only (docs/decisions/variants.md)
    selector         method of choosing the recomputed tokens, a name in `selectors.SELECTORS`
    probe_min_rows   smallest number of computed rows for which a selector's probe runs. A probe reads half of the
                     weights once more: a tenth of the time of a prompt of 700 tokens
    budget_scope     "chunk": each chunk spends its own budget, as in the paper; "prompt": the budgets are added and
                     spent on the best tokens of the whole prompt
    drift            strength of drift correction, in [0, 1]: the part of the mean change of a chunk's recomputed
                     tokens by which its stale tokens are moved (see `compute.stale_tokens.drift_correction`); 0 = off,
                     as in the paper
    early_termination         recompute less of chunks that the question does not attend to. "off": recompute all.
                              "probe": nothing is recomputed of chunks out of focus for the selector's probe: half of
                              the work, and more divergence (docs/decisions/focus.md); acts if the probe sees five
                              chunks or more, unless `recompute_ratio` is 1. "published": Algorithm 1, which stops
                              within the last pass
    early_termination_window  w of Algorithm 1, for "published": consecutive layers that must agree. The paper prints no
                              value; its Fig. 17 fits 8
    loading          treatment of chunk-caches that are not in memory. "cake": load from the end of the prompt while
                     its front is computed. "layerwise": compute nothing that is stored and load each layer before it
                     is used. "whole": load everything, then compute
    """

    scope: Scope = "anywhere"
    alpha: float | None = None
    scoring: Scoring = "corrected"
    selector: str = "question"
    probe_min_rows: int = 0
    budget_scope: BudgetScope = "prompt"
    drift: float = 0.4
    early_termination: EarlyTerminationRule = "off"
    early_termination_window: int = 3
    loading: Loading = "cake"

    @classmethod
    def paper(cls, **changes: Any) -> Self:
        """Return the method as it was published, except for `changes`.

        The variant with the lowest CFO is reused. Each chunk recomputes the fraction CFO of its tokens (eq. 12, with
        α = 1, as in the ablation of Fig. 26), those with the highest scores of eq. 14, until Algorithm 1 stops it. Its
        other tokens stay as they were stored. Chunk-caches load from the end of the prompt while its front is computed
        (Cake). `alpha=None` takes the α that `cachecraft calibrate --preset paper` found (eq. 13), or else 0.25.

        >>> method = ReuseMethod.paper(alpha=2.0)
        >>> method.selector, method.drift, method.early_termination, method.loading, method.alpha
        ('cache_craft', 0.0, 'published', 'cake', 2.0)
        """
        published: dict[str, Any] = {
            "alpha": 1.0,
            "scoring": "published",
            "selector": "cache_craft",
            "budget_scope": "chunk",
            "drift": 0.0,
            "early_termination": "published",
        }
        return cls(**published | changes)

    def __post_init__(self) -> None:
        """Check every field."""
        check_choice("scope", self.scope, get_args(Scope))
        check_number("alpha", self.alpha, most=FINITE, optional=True)
        check_choice("scoring", self.scoring, get_args(Scoring))
        check_text("selector", self.selector)
        selector_named(self.selector)
        check_whole("probe_min_rows", self.probe_min_rows)
        check_choice("budget_scope", self.budget_scope, get_args(BudgetScope))
        check_number("drift", self.drift, most=1)
        check_choice("early_termination", self.early_termination, get_args(EarlyTerminationRule))
        check_whole("early_termination_window", self.early_termination_window, least=1)
        check_choice("loading", self.loading, get_args(Loading))

    @property
    def is_baseline(self) -> bool:
        """True if CFO decides without an α too: with `scoring="published"`, or in the scope "set"."""
        return self.scoring == "published" or self.scope == "set"


_METHOD_NAMES = tuple(setting.name for setting in fields(ReuseMethod))
_IN_METHOD = MappingProxyType({name: f"method.{name}" for name in _METHOD_NAMES})
_AS_ARGUMENT = MappingProxyType({name: f"method=ReuseMethod({name}=…)" for name in _METHOD_NAMES})


@refuses_other_names(what="setting of reuse", hints=_AS_ARGUMENT)
@dataclass(frozen=True, slots=True)
class ReuseConfig:
    """Settings of reuse.

    reuse              reuse stored chunk-caches. False computes every prompt in full and still captures its chunks, so
                       later requests reuse them exactly; to compare with full prefill, use `full_prefill()`
    capture            store newly computed chunk-caches
    recompute_ratio    fraction of the tokens to recompute of each chunk in a new context; 1 is exact, also with a lossy
                       codec. None = CFO decides with α (maybe calibrated) or "published" scoring, else `DEFAULT_RATIO`
    nearest_share      largest part of the prompt's chunk tokens that the last chunk, directly before the question, may
                       have for it to be recomputed in full; 0 = never, as in the paper. The same number of tokens,
                       chosen from the whole prompt, is better (docs/decisions/recomputed-rows.md)
    min_prompt_tokens  prompts with fewer tokens are computed in full, and nothing of them is captured, because they
                       would take longer with reuse. None = the length that was measured on a GPU, when an engine
                       started (`from_pretrained`, or a vLLM server) or by `Engine.measure_min_prompt_tokens`; elsewhere
                       0, all prompts
    plain_prompts      reuse in prompts without documents (unmarked text). "reuse" recognises text that was captured
                       before and captures passages that occur again; "off" computes the whole prompt
    method             how chunk-caches are reused: a `ReuseMethod`, for comparing methods
    """

    reuse: bool = True
    capture: bool = True
    recompute_ratio: float | None = None
    nearest_share: float = 0.0
    min_prompt_tokens: int | None = None
    plain_prompts: PlainPromptsMode = "reuse"
    method: ReuseMethod = field(default_factory=ReuseMethod)

    @classmethod
    def paper(cls, **changes: Any) -> Self:
        """Return `ReuseMethod.paper()` for prompts of every length, except for `changes`; their `method` replaces it.

        `EngineConfig.paper()` also sets what concerns the whole engine: eviction, new variants, the order of chunks.
        docs/results/papers.md compares both with the papers line by line.
        """
        published: dict[str, Any] = {"min_prompt_tokens": 0, "method": ReuseMethod.paper()}
        return cls(**published | changes)

    @classmethod
    def full_prefill(cls) -> Self:
        """Return the baseline to compare with: no reuse, `plain_prompts` off, and no captures, unlike `reuse=False`.

        >>> config = ReuseConfig.full_prefill()
        >>> config.reuse, config.capture
        (False, False)
        """
        return cls(reuse=False, capture=False, plain_prompts="off")

    @classmethod
    def deterministic(cls, **changes: Any) -> Self:
        """Return settings with which a request changes no chunk-cache and decides nothing by time.

        They capture nothing, reuse in prompts of every length and load layer by layer; `changes` may undo this. With
        `EngineConfig(new_variants="off")`, one request at a time and greedy sampling, the same question over the same
        primed store gives the same answer each time.

        >>> config = ReuseConfig.deterministic(recompute_ratio=0.3)
        >>> config.capture, config.method.loading, config.recompute_ratio
        (False, 'layerwise', 0.3)
        """
        fixed: dict[str, Any] = {
            "capture": False,
            "min_prompt_tokens": 0,
            "method": ReuseMethod(loading="layerwise"),
        }
        return cls(**fixed | changes)

    def __post_init__(self) -> None:
        """Check every field."""
        check_flag("reuse", self.reuse)
        check_flag("capture", self.capture)
        check_number("recompute_ratio", self.recompute_ratio, most=1, optional=True)
        check_number("nearest_share", self.nearest_share, most=1)
        check_whole("min_prompt_tokens", self.min_prompt_tokens, optional=True)
        check_choice("plain_prompts", self.plain_prompts, get_args(PlainPromptsMode))
        check_kind(
            "method",
            self.method,
            ReuseMethod,
            advice="write ReuseMethod(drift=…), or use with_method",
        )

    def with_method(self, **changes: Any) -> Self:
        """Return a copy with these fields of its method changed.

        >>> ReuseConfig().with_method(alpha=0.5).method.alpha
        0.5
        """
        return replace(self, method=replace(self.method, **changes))

    def changed_by(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with these JSON values: fields, and in "method" fields of the method.

        >>> ReuseConfig().changed_by({"capture": False, "method": {"drift": 0}}).differences(ReuseConfig())
        ['capture', 'method.drift']
        """
        check_names(values, self.__match_args__, hints=_IN_METHOD)
        of_method = values.get("method", {})
        check_mapping("method", of_method)
        method = replace(self.method, **of_method)
        return replace(self, **{**values, "method": method})

    def differences(self, other: ReuseConfig) -> list[str]:
        """Return the names of the settings that differ, in the order of the fields; of the method as "method.…"."""
        names = [setting.name for setting in fields(self) if setting.name != "method"]
        return [
            name
            for name in (*names, *_IN_METHOD.values())
            if attrgetter(name)(self) != attrgetter(name)(other)
        ]

    @property
    def ratio_in_use(self) -> float | None:
        """Fraction of the tokens to recompute of each chunk in a new context; None: CFO decides.

        >>> ReuseConfig().ratio_in_use, ReuseConfig().with_method(alpha=0.5).ratio_in_use
        (0.2, None)
        >>> ReuseConfig.paper().ratio_in_use is None
        True
        """
        has_own_ratio = self.recompute_ratio is not None
        if has_own_ratio or self.method.alpha is not None or self.method.is_baseline:
            return self.recompute_ratio
        return DEFAULT_RATIO

    def for_prompt(self, tokens: int, *, measured: int = 0) -> Self:
        """Return these settings, or, for a prompt that is too short, a copy without reuse and captures.

        The shortest prompt with reuse has `min_prompt_tokens`, or `measured` tokens if that is None; the copy keeps
        this number. Settings without reuse are returned as they are, captures included.

        >>> ReuseConfig(min_prompt_tokens=1000).for_prompt(800).reuse
        False
        """
        least = measured if self.min_prompt_tokens is None else self.min_prompt_tokens
        if not self.reuse or tokens >= least:
            return self
        return replace(self, reuse=False, capture=False, min_prompt_tokens=least)

    def is_too_short(self, tokens: int) -> bool:
        """Return True if reuse is off and `tokens` are fewer than `min_prompt_tokens`, as `for_prompt` sets both."""
        return not self.reuse and tokens < (self.min_prompt_tokens or 0)
