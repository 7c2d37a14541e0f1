"""Settings of reuse, as a frozen dataclass that is validated when it is created."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

from cachecraft_rag.checks import (
    FINITE,
    check_choice,
    check_flag,
    check_number,
    check_text,
    check_whole,
)
from cachecraft_rag.errors import ConfigError
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


@dataclass(frozen=True, slots=True)
class ReuseConfig:
    """Settings of reuse.

    reuse            reuse stored chunk-caches. False computes every prompt in full and still captures its chunks, so
                     later requests reuse them exactly; to compare with full prefill, use `full_prefill()`
    capture          store newly computed chunk-caches
    scope            contexts in which a chunk-cache may be reused. "anywhere": at any position after any chunks
                     (Cache-Craft). "prefix": after its origin prefix only (the exact baseline PREFIX-CACHE of
                     Cache-Craft §5.1.4). "set": after the chunks of its origin prefix in any order, without
                     recomputation unless `recompute_ratio` is set (the baseline SET-CACHE of §5.1.4)
    alpha            factor of CFO (α of equation 12), which then decides how much of each chunk is recomputed. None =
                     the value that `cachecraft calibrate` found for this model and store; without one every chunk has
                     the same ratio
    recompute_ratio  fraction of the tokens to recompute of each chunk in a new context; 1 is exact, also with a lossy
                     codec. None = CFO decides if there is an α, given or calibrated, or else `DEFAULT_RATIO`. With a
                     ratio, α is ignored: CFO at `DEFAULT_ALPHA` only ranks the variants of a chunk
    scoring          how the variants of a chunk are scored. "published": CFO as printed (eq. 12), and the variant with
                     the lowest CFO is reused. "corrected": of the overlap β′ of an inexact capture only its exact share
                     counts, and to compare variants CFO is weighted, less for a variant that was primed and more for
                     one that was captured after the instruction only (docs/decisions/variants.md)
    selector         method of choosing the recomputed tokens, a name in `selectors.SELECTORS`
    probe_min_rows   smallest number of computed rows for which a selector's probe runs. A probe reads half of the
                     weights once more: a tenth of the time of a prompt of 700 tokens
    nearest_share    largest part of the prompt's chunk tokens that the last chunk, directly before the question, may
                     have for it to be recomputed in full; 0 = never, as in the paper. As many tokens of the whole
                     prompt are the better choice (docs/decisions/recomputed-rows.md)
    budget_scope     "chunk": each chunk spends its own budget, as in the paper; "prompt": the budgets are added and
                     spent on the best tokens of the whole prompt
    drift            strength of drift correction, in [0, 1]: the part of the mean change of a chunk's recomputed
                     tokens by which its stale tokens are moved (see `compute.stale_tokens.drift_correction`); 0 = off,
                     as in the paper
    refresh_rows     number of stale tokens to recompute with each decode step, most attended first (see
                     `compute.stale_tokens.refresh`); 0 = off. Not supported in a server: vLLM's decode steps carry
                     rows of the answer only
    early_termination         recompute less of chunks that the question does not attend to. "off": recompute all.
                              "probe": nothing is recomputed of chunks out of focus for the selector's probe: half of
                              the work, and more divergence (docs/decisions/focus.md); acts in prompts of five chunks
                              and more, unless `recompute_ratio` is 1. "published": Algorithm 1, which stops within the
                              last pass; not together with `refresh_rows`
    early_termination_window  w of Algorithm 1, for "published": consecutive layers that must agree. The paper prints no
                              value; its Fig. 17 fits 8
    plain_prompts    reuse in prompts without documents (unmarked text). "reuse" recognises text that was captured
                     before and captures passages that occur again; "off" computes the whole prompt
    min_prompt_tokens  prompts with fewer tokens are computed in full, and nothing of them is captured, because they
                     would take longer with reuse. None = the length that was measured on a GPU, when an engine started
                     (`from_pretrained`, or a vLLM server) or by `Engine.measure_min_prompt_tokens`; elsewhere 0, all
                     prompts
    loading          treatment of chunk-caches that are not in memory. "cake": load from the end of the prompt while
                     its front is computed. "layerwise": compute nothing that is stored and load each layer before it
                     is used. "whole": load everything, then compute

    Raises ConfigError for a value that is unknown, out of range or of a wrong type, and TypeError for the name of a
    setting that does not exist.
    """

    reuse: bool = True
    capture: bool = True
    scope: Scope = "anywhere"
    alpha: float | None = None
    recompute_ratio: float | None = None
    scoring: Scoring = "corrected"
    selector: str = "question"
    probe_min_rows: int = 0
    nearest_share: float = 0.0
    budget_scope: BudgetScope = "prompt"
    drift: float = 0.4
    refresh_rows: int = 0
    early_termination: EarlyTerminationRule = "off"
    early_termination_window: int = 3
    plain_prompts: PlainPromptsMode = "reuse"
    loading: Loading = "cake"
    min_prompt_tokens: int | None = None

    @classmethod
    def paper(cls, **changes: object) -> Self:
        """Return the settings of Cache-Craft and Cake as published, but for these changes.

        Of single requests; `EngineConfig.paper()` also sets what concerns the whole engine. α is 1, as in the ablation
        of Fig. 26; `alpha=None` takes the one that `cachecraft calibrate --preset paper` found (eq. 13).
        docs/results/papers.md compares line by line.

        >>> config = ReuseConfig.paper(alpha=2.0)
        >>> config.selector, config.drift, config.early_termination, config.loading, config.alpha
        ('cache_craft', 0.0, 'published', 'cake', 2.0)
        """
        published: dict[str, Any] = {
            "alpha": 1.0,
            "scoring": "published",
            "selector": "cache_craft",
            "nearest_share": 0.0,
            "budget_scope": "chunk",
            "drift": 0.0,
            "early_termination": "published",
            "loading": "cake",
            "min_prompt_tokens": 0,
        }
        return cls(**published | changes)

    @classmethod
    def full_prefill(cls) -> Self:
        """Return settings that reuse nothing and capture nothing: the baseline to compare reuse with.

        `ReuseConfig(reuse=False)` is none: it captures chunks, which later requests reuse exactly.

        >>> config = ReuseConfig.full_prefill()
        >>> config.reuse, config.capture
        (False, False)
        """
        return cls(reuse=False, capture=False, plain_prompts="off")

    @classmethod
    def deterministic(cls, **changes: object) -> Self:
        """Return settings with which a request changes no chunk-cache and decides nothing by time.

        With `EngineConfig(new_variants="off")`, one request at a time and greedy sampling, the same question over the
        same primed store gives the same answer each time.

        >>> config = ReuseConfig.deterministic(recompute_ratio=0.3)
        >>> config.capture, config.loading, config.recompute_ratio
        (False, 'layerwise', 0.3)
        """
        fixed: dict[str, Any] = {
            "capture": False,
            "loading": "layerwise",
            "min_prompt_tokens": 0,
        }
        return cls(**fixed | changes)

    def __post_init__(self) -> None:
        """Check every field."""
        check_flag("reuse", self.reuse)
        check_flag("capture", self.capture)
        check_choice("scope", self.scope, get_args(Scope))
        check_number("alpha", self.alpha, most=FINITE, optional=True)
        check_number("recompute_ratio", self.recompute_ratio, most=1, optional=True)
        check_choice("scoring", self.scoring, get_args(Scoring))
        check_text("selector", self.selector)
        selector_named(self.selector)
        check_whole("probe_min_rows", self.probe_min_rows)
        check_number("nearest_share", self.nearest_share, most=1)
        check_choice("budget_scope", self.budget_scope, get_args(BudgetScope))
        check_number("drift", self.drift, most=1)
        check_whole("refresh_rows", self.refresh_rows)
        check_choice("early_termination", self.early_termination, get_args(EarlyTerminationRule))
        check_whole("early_termination_window", self.early_termination_window, least=1)
        if self.early_termination == "published" and self.refresh_rows:
            raise ConfigError(
                "refresh_rows and Algorithm 1 both observe the last pass, and only one of them can: set "
                'refresh_rows=0, or early_termination="off" or "probe"'
            )
        check_choice("plain_prompts", self.plain_prompts, get_args(PlainPromptsMode))
        check_choice("loading", self.loading, get_args(Loading))
        check_whole("min_prompt_tokens", self.min_prompt_tokens, optional=True)

    @property
    def fixed_ratio(self) -> float | None:
        """Fraction of the tokens to recompute of each chunk in a new context; None: CFO decides.

        >>> ReuseConfig().fixed_ratio, ReuseConfig(alpha=0.5).fixed_ratio, ReuseConfig.paper().fixed_ratio
        (0.2, None, None)
        """
        is_baseline = self.scoring == "published" or self.scope == "set"
        if self.recompute_ratio is not None or self.alpha is not None or is_baseline:
            return self.recompute_ratio
        return DEFAULT_RATIO

    def for_prompt(self, tokens: int, *, measured: int = 0) -> Self:
        """Return these settings, or for a prompt too short to reuse anything, a copy that switches it all off.

        `measured` is the least length in place of a `min_prompt_tokens` of None.

        >>> ReuseConfig(min_prompt_tokens=1000).for_prompt(800).reuse
        False
        """
        least = measured if self.min_prompt_tokens is None else self.min_prompt_tokens
        if not self.reuse or tokens >= least:
            return self
        return replace(self, reuse=False, capture=False, min_prompt_tokens=least)

    def is_too_short(self, tokens: int) -> bool:
        """Return True if `for_prompt` has switched reuse off for a prompt of this length, in tokens."""
        return not self.reuse and tokens < (self.min_prompt_tokens or 0)
