"""The methods under comparison: the paper's, those of later work and this package's, all run by the same engine.

A new method is one entry in `methods_for`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.baselines import H2O, no_overlap, no_positions, question_alone, value_deviation
from benchmarks.compression import Lingua2, MapReduce, preparation
from cachecraft_rag.evaluation.measuring import FULL_PREFILL, METHODS, PLAIN, Method
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.dataset import Dataset

Config = Callable[[float], ReuseConfig]

_PAPER = ReuseConfig.paper(
    capture=PLAIN.capture,
    method=ReuseMethod.paper(loading=PLAIN.method.loading, early_termination="off"),
)
_CRAFT = "Cache-Craft §5.1.4"


def _paper(selector: str = "cache_craft") -> Config:
    return lambda ratio: replace(_PAPER.with_method(selector=selector), recompute_ratio=ratio)


def _ours(nearest_share: float = 0.0, **method: Any) -> Config:
    reuse = replace(PLAIN.with_method(**method), nearest_share=nearest_share)
    return lambda ratio: replace(reuse, recompute_ratio=ratio)


def _fixed(config: ReuseConfig) -> Config:
    return lambda _: config


def _craft_alpha(alpha: float, **changes: Any) -> Config:
    """Cache-Craft as in the paper: CFO decides how much is recomputed."""
    return _fixed(_PAPER.with_method(alpha=alpha, **changes))


CRAFT = Method("craft", "Cache-Craft eq. 14", _paper(), takes_ratio=True)

# Ablations. The first group is Cache-Craft's Fig. 26 (α = 1 is a recompute ratio of about 0.65), the second its Table 3
# at r = 0.30, the third takes this package's default apart.
_ABLATIONS = (
    *(
        Method(f"alpha_{alpha:g}", "Cache-Craft Fig. 26", _craft_alpha(alpha))
        for alpha in (0.25, 0.5, 1.0, 2.0, 3.0)
    ),
    # "corrected": `no_overlap` makes every capture inexact, and only this scoring then counts β′ as 0
    Method(
        "alpha_0.5_no_beta",
        "Cache-Craft Fig. 26",
        _craft_alpha(0.5, scoring="corrected"),
        prepare=no_overlap,
    ),
    Method("alpha_0.5_no_cci", "Cache-Craft Fig. 26", _craft_alpha(0.5, selector="random")),
    Method(
        "alpha_0.5_early_termination",
        "Cache-Craft Fig. 26",
        _craft_alpha(0.5, early_termination="published", early_termination_window=3),
    ),
    Method("no_position", "Cache-Craft Table 3", _fixed(_paper()(0.3)), prepare=no_positions),
    Method(
        "no_position_no_causality",
        "Cache-Craft Table 3",
        _fixed(_paper()(0.0)),
        prepare=no_positions,
    ),
    Method("no_causality", "Cache-Craft Table 3", _fixed(_paper()(0.0))),
    Method("no_drift", "this package", _ours(drift=0.0), takes_ratio=True),
    Method("scattered", "this package", _ours(), takes_ratio=True),
    # the default of 25 to 29 November 2026
    Method("nearest", "this package", _ours(nearest_share=0.35), takes_ratio=True),
    # the default before
    Method(
        "earlier_default",
        "this package",
        _ours(probe_min_rows=128),
        takes_ratio=True,
    ),
    Method("no_shared_budget", "this package", _ours(budget_scope="chunk"), takes_ratio=True),
    Method(
        "craft_drift",
        "this package",
        _ours(selector="cache_craft", budget_scope="chunk"),
        takes_ratio=True,
    ),
)
ABLATIONS: Mapping[str, Method] = {method.name: method for method in _ABLATIONS}


def methods_for(dataset: Dataset, *, lingua2_model: str | None = None) -> dict[str, Method]:
    """Every method, ablations last; lingua2 only with its model.

    Args:
        dataset: whose chunks H2O may have to compute again.
        lingua2_model: LLMLingua-2 model, name or folder.
    """
    chunks = {chunk.chunk_id: chunk for document in dataset.documents for chunk in document}
    methods = [
        FULL_PREFILL,
        METHODS["prefix_cache"],
        Method("set_cache", _CRAFT, _fixed(PLAIN.with_method(scope="set", drift=0.0))),
        METHODS["full_cache"],
        Method("random", _CRAFT, _paper("random"), takes_ratio=True),
        CRAFT,
        Method("h2o", _CRAFT, _paper(), takes_ratio=True, prepare=H2O(chunks)),
        Method("leading", "EPIC", _paper("leading"), takes_ratio=True),
        Method(
            "value_deviation",
            "CacheBlend §4.3",
            _paper(),
            takes_ratio=True,
            prepare=value_deviation,
        ),
        Method(
            "question_alone",
            "ProphetKV, QCFuse",
            _ours(drift=0.0),
            takes_ratio=True,
            prepare=question_alone,
        ),
        METHODS["default"],
        Method(
            "mapreduce",
            _CRAFT,
            FULL_PREFILL.config,
            takes_ratio=True,
            prepare=preparation(MapReduce),
        ),
    ]
    if lingua2_model is not None:
        model = lingua2_model
        prepare = preparation(
            lambda engine: Lingua2(
                model, tokenizer=engine.decoder.tokenizer, device=str(engine.decoder.device)
            )
        )
        methods.append(
            Method("lingua2", _CRAFT, FULL_PREFILL.config, takes_ratio=True, prepare=prepare)
        )
    return {method.name: method for method in methods} | dict(ABLATIONS)
