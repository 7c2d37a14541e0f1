"""Settings of reuse: frozen, validated when made; unknown names are an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from cachecraft_rag.checks import FINITE, check_choice, check_flag, check_number, check_text, check_whole
from cachecraft_rag.planning.selectors import BudgetScope, selector_named

DEFAULT_ALPHA = 0.25


PlainPrompts = Literal["off", "reuse"]
Loading = Literal["cake", "layerwise", "whole"]
Scope = Literal["anywhere", "prefix", "set"]


@dataclass(frozen=True, slots=True)
class ReuseConfig:
    """Settings of reuse.

    reuse            reuse stored chunk-caches; False computes every prompt in full, and still captures new
                     chunk-caches unless `capture` is off
    capture          store newly computed chunk-caches
    scope            where a chunk-cache may serve: "anywhere" (Cache-Craft); "prefix", only behind its origin prefix
                     (PREFIX-CACHE, exact); "set", behind the same chunks in any order, nothing recomputed (SET-CACHE;
                     both of Cache-Craft §5.1.4)
    alpha            α of eq. 12. None = as `cachecraft calibrate` found it for this model and store, or else
                     DEFAULT_ALPHA: a chunk whose origin prefix is gone altogether recomputes about 15 % of its tokens
    recompute_ratio  share of each moved chunk's tokens to recompute, 1 is exact; with a lossy codec too. None = CFO
                     decides. With a ratio, α is ignored: CFO at DEFAULT_ALPHA only ranks the variants of a chunk
    selector         which tokens are recomputed, a name of `selectors.SELECTORS`
    probe_min_rows   a selector's probe runs only if at least this many rows will be computed: it reads half of the
                     weights once more, which takes too large a share of a small pass
    budget_scope     "chunk": each chunk spends its own budget, as in the paper; "prompt": the budgets are added up and
                     go to the best tokens of the whole prompt
    drift            how far the other tokens of a chunk follow the mean change of its recomputed tokens, see
                     `compute.drift_correction`; 0 = not at all, as in the paper
    refresh_rows     tokens that were reused as they were stored and are recomputed with each decode step, those first
                     that the answer attends to most, see `compute.refresh`; 0 = none. An engine in a server refuses it:
                     vLLM's steps carry rows of the answer only
    early_termination         stop early for chunks that the question does not look at, by Algorithm 1 as printed
    early_termination_window  w of Algorithm 1
    plain_prompts    of text in a prompt without documents: "reuse" recognises what was captured before and captures
                     passages that come again; "off" computes all of it. See `engine.plain_prompts`
    loading          of what is not in memory: "cake" loads from the back while the front is computed; "layerwise"
                     computes nothing that is stored and loads each layer ahead of its use; "whole" loads, then computes
    """

    reuse: bool = True
    capture: bool = True
    scope: Scope = "anywhere"
    alpha: float | None = None
    recompute_ratio: float | None = None
    selector: str = "question"
    probe_min_rows: int = 128
    budget_scope: BudgetScope = "prompt"
    drift: float = 0.4
    refresh_rows: int = 0
    early_termination: bool = False
    early_termination_window: int = 3
    plain_prompts: PlainPrompts = "reuse"
    loading: Loading = "cake"

    @classmethod
    def paper(cls, **changes: Any) -> Self:
        """Cache-Craft and Cake as published.

        Each chunk recomputes the CFO share of its tokens (eq. 12), the highest of eq. 14, until Algorithm 1 ends it;
        the others stay as stored. Chunk-caches load from the back while the front is computed (Cake).

        Args:
            changes: settings that are to differ.

        >>> config = ReuseConfig.paper(alpha=1.0)
        >>> config.selector, config.drift, config.early_termination, config.loading, config.alpha
        ('cache_craft', 0.0, True, 'cake', 1.0)
        """
        published: dict[str, Any] = {
            "selector": "cache_craft",
            "budget_scope": "chunk",
            "drift": 0.0,
            "early_termination": True,
            "loading": "cake",
        }
        return cls(**published | changes)

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        check_flag("reuse", self.reuse)
        check_flag("capture", self.capture)
        check_choice("scope", self.scope, get_args(Scope))
        check_number("alpha", self.alpha, most=FINITE, optional=True)
        check_number("recompute_ratio", self.recompute_ratio, most=1, optional=True)
        check_text("selector", self.selector)
        selector_named(self.selector)
        check_whole("probe_min_rows", self.probe_min_rows)
        check_choice("budget_scope", self.budget_scope, get_args(BudgetScope))
        check_number("drift", self.drift, most=1)
        check_whole("refresh_rows", self.refresh_rows)
        check_flag("early_termination", self.early_termination, advice="True is Algorithm 1 as printed, the only rule")
        check_whole("early_termination_window", self.early_termination_window, least=1)
        check_choice("plain_prompts", self.plain_prompts, get_args(PlainPrompts))
        check_choice("loading", self.loading, get_args(Loading))
