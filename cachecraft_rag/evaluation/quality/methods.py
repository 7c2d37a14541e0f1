"""The methods under comparison: the paper's, those of later work and this package's, all run by the same engine.

`METHODS` is the one registry; a new method is one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig


@dataclass(frozen=True)
class Method:
    """One way to answer.

    name         in tables and in `cachecraft eval --methods`
    source       the paper or package that it comes from
    config       recompute ratio r → settings of the engine; methods without a ratio get 0.0
    takes_ratio  whether the method depends on r; it then runs at each r
    compression  the compressor that first shortens the chunks to the share r of their tokens; the shorter prompt is
                 then computed in full
    """

    name: str
    source: str
    config: Callable[[float], ReuseConfig]
    takes_ratio: bool = False
    compression: Literal["mapreduce", "lingua2"] | None = None


# Captures nothing, and loads every stored layer even where computing it would be faster.
_BASE = ReuseConfig(capture=False, loading="layerwise")
# As in the paper: each chunk has its own budget, and tokens that are not recomputed stay as stored.
_PAPER = replace(_BASE, budget_scope="chunk", drift=0.0, correction="off", selector="cache_craft")
_FULL = replace(_BASE, reuse=False)


def _selected(selector: str, ratio: float) -> ReuseConfig:
    return replace(_PAPER, selector=selector, probe_min_rows=0, recompute_ratio=ratio)


def _fixed(config: ReuseConfig) -> Callable[[float], ReuseConfig]:
    return lambda _: config


def _ours(ratio: float, **changes: Any) -> ReuseConfig:
    return replace(_BASE, recompute_ratio=ratio, **changes)


_CRAFT = "Cache-Craft §5.1.4"

_ALL = (
    Method("full_recompute", _CRAFT, _fixed(_FULL)),
    Method("prefix_cache", _CRAFT, _fixed(replace(_BASE, scope="prefix"))),
    Method("set_cache", _CRAFT, _fixed(replace(_BASE, scope="set", drift=0.0, correction="off"))),
    Method("full_cache", _CRAFT, partial(_selected, "cache_craft")),
    Method("random", _CRAFT, partial(_selected, "random"), takes_ratio=True),
    Method("craft", "Cache-Craft eq. 14", partial(_selected, "cache_craft"), takes_ratio=True),
    Method("h2o", _CRAFT, partial(_selected, "h2o"), takes_ratio=True),
    Method("leading", "EPIC", partial(_selected, "leading"), takes_ratio=True),
    Method("value_deviation", "CacheBlend §4.3", partial(_selected, "value_deviation"), takes_ratio=True),
    Method("default", "this package", _ours, takes_ratio=True),
    Method("question", "this package", partial(_ours, probe_min_rows=0), takes_ratio=True),
    Method("mapreduce", _CRAFT, _fixed(_FULL), takes_ratio=True, compression="mapreduce"),
    Method("lingua2", _CRAFT, _fixed(_FULL), takes_ratio=True, compression="lingua2"),
)

METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _ALL})


def _paper(alpha: float, **changes: Any) -> Callable[[float], ReuseConfig]:
    """Cache-Craft as in the paper: CFO decides how much is recomputed."""
    return _fixed(replace(_PAPER, alpha=alpha, **changes))


# Ablations. The first group is Cache-Craft's Fig. 26 (α = 1 is a recompute ratio of about 0.65), the second its Table 3
# at r = 0.30, the third takes this package's default apart.
_ABLATIONS = (
    *(Method(f"alpha_{alpha:g}", "Cache-Craft Fig. 26", _paper(alpha)) for alpha in (0.25, 0.5, 1.0, 2.0, 3.0)),
    Method("alpha_0.5_no_beta", "Cache-Craft Fig. 26", _paper(0.5, ablate=frozenset({"overlap"}))),
    Method("alpha_0.5_no_cci", "Cache-Craft Fig. 26", _paper(0.5, selector="random")),
    Method("alpha_0.5_early_termination", "Cache-Craft Fig. 26", _paper(0.5, early_termination="printed")),
    Method("no_position", "Cache-Craft Table 3", _paper(1.0, recompute_ratio=0.3, ablate=frozenset({"positions"}))),
    Method(
        "no_position_no_causality",
        "Cache-Craft Table 3",
        _paper(1.0, recompute_ratio=0.0, ablate=frozenset({"positions"})),
    ),
    Method("no_causality", "Cache-Craft Table 3", _paper(1.0, recompute_ratio=0.0)),
    Method("no_drift", "this package", partial(_ours, drift=0.0), takes_ratio=True),
    Method("no_correction", "this package", partial(_ours, correction="off"), takes_ratio=True),
    Method("no_shared_budget", "this package", partial(_ours, budget_scope="chunk"), takes_ratio=True),
    Method(
        "craft_drift",
        "this package",
        partial(_ours, selector="cache_craft", budget_scope="chunk", correction="off"),
        takes_ratio=True,
    ),
)

ABLATIONS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _ABLATIONS})

_OLD_NAMES = {"alpha_0.5_focus": "alpha_0.5_early_termination", "no_sharing": "no_shared_budget"}  # still accepted


def methods_named(names: Sequence[str]) -> list[Method]:
    """The methods with these names, in the given order, each once; "ablations" stands for all of `ABLATIONS`.

    Raises:
        ConfigError: a name is unknown; the message lists the known ones.
    """
    known = {**METHODS, **ABLATIONS}
    wanted = [one for name in names for one in (ABLATIONS if name == "ablations" else (_OLD_NAMES.get(name, name),))]
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"unknown method {', '.join(unknown)}; choose among {', '.join(known)}, ablations")
    return [known[name] for name in dict.fromkeys(wanted)]
