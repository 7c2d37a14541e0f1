"""Settings: what is out of range or unknown is refused when they are made."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.sampling import SamplingParams


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": -0.1},
        {"alpha": math.nan},
        {"alpha": math.inf},  # infinity times no overlap lost is no number
        {"recompute_ratio": 1.01},
        {"recompute_ratio": -0.01},
        {"recompute_ratio": math.nan},
        {"early_termination": "gap"},
        {"early_termination_window": 0},
        {"selector": "best"},
    ],
    ids=str,
)
def test_reuse_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ReuseConfig(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.5},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"stop": "END"},
        {"stop": ("END", "")},
    ],
    ids=str,
)
def test_sampling_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        (ReuseConfig, {"alpha": 0, "recompute_ratio": 0, "early_termination_window": 1}),
        (
            ReuseConfig,
            {"recompute_ratio": 1.0, "early_termination": "published", "selector": "random"},
        ),
        (SamplingParams, {"max_new_tokens": 1, "temperature": 0, "top_p": 1.0, "stop": ()}),
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_allowed(settings: Any, ends: dict[str, Any]) -> None:
    made = settings(**ends)
    assert {name: getattr(made, name) for name in ends} == ends


@pytest.mark.parametrize(("settings", "known"), [(ReuseConfig, "alpha"), (SamplingParams, "seed")])
def test_unknown_names_are_refused_and_settings_do_not_change(settings: Any, known: str) -> None:
    with pytest.raises(TypeError, match="beta"):
        settings(beta=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings(), known, 1)


def test_a_config_error_is_also_a_value_error() -> None:
    with pytest.raises(ValueError, match="alpha"):
        ReuseConfig(alpha=-1)


def test_settings_keep_what_a_generator_gives() -> None:
    sampling = SamplingParams(stop=(text for text in ("\n", "END")))  # type: ignore[arg-type]
    assert (sampling.stop, SamplingParams(stop=["a"]).stop) == (("\n", "END"), ("a",))  # type: ignore[arg-type]
