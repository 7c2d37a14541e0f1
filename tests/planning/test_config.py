"""Settings: what is out of range or unknown is refused when they are made."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.config import Audits, NewVariants
from cachecraft_rag.serving.sampling import SamplingParams


@pytest.mark.parametrize(
    "wrong",
    [
        {"recompute_ratio": 1.01},
        {"recompute_ratio": -0.01},
        {"recompute_ratio": math.nan},
    ],
    ids=str,
)
def test_reuse_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ReuseConfig(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": -0.1},
        {"alpha": math.nan},
        {"alpha": math.inf},  # infinity times no overlap lost is no number
        {"early_termination": "gap"},
        {"early_termination_window": 0},
        {"selector": "best"},
    ],
    ids=str,
)
def test_a_method_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ReuseMethod(**wrong)
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ReuseConfig().with_method(**wrong)


def test_json_changes_settings_and_a_name_in_the_wrong_place_is_shown_the_right_one() -> None:
    changed = ReuseConfig().changed_by({"recompute_ratio": 0.3, "method": {"drift": 0.0}})
    assert changed == ReuseConfig(recompute_ratio=0.3, method=ReuseMethod(drift=0.0))
    assert ReuseConfig().changed_by(dataclasses.asdict(changed)) == changed
    with pytest.raises(ConfigError, match=r"drift: no such option. Did you mean method\.drift"):
        ReuseConfig().changed_by({"drift": 0.0})
    with pytest.raises(ConfigError, match="capture: no such setting of method"):
        ReuseConfig().changed_by({"method": {"capture": False}})
    with pytest.raises(ConfigError, match="method must be a mapping"):
        ReuseConfig().changed_by({"method": 3})


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
        (ReuseConfig, {"recompute_ratio": 0, "nearest_share": 1}),
        (ReuseMethod, {"alpha": 0, "early_termination_window": 1}),
        (ReuseMethod, {"early_termination": "published", "selector": "random"}),
        (SamplingParams, {"max_new_tokens": 1, "temperature": 0, "top_p": 1.0, "stop": ()}),
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_allowed(settings: Any, ends: dict[str, Any]) -> None:
    made = settings(**ends)
    assert {name: getattr(made, name) for name in ends} == ends


def test_a_setting_of_the_method_outside_of_it_is_refused_with_its_place() -> None:
    place = r"drift: no such setting of reuse\. Did you mean method=ReuseMethod\(drift=…\)"
    with pytest.raises(ConfigError, match=place):
        ReuseConfig(drift=0.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=place):
        dataclasses.replace(ReuseConfig(), drift=0.0)  # type: ignore[call-arg]
    assert list(inspect.signature(ReuseConfig).parameters)[-1] == "method"
    assert ReuseConfig(False, capture=False) == ReuseConfig(reuse=False, capture=False)


@pytest.mark.parametrize(
    ("settings", "known", "typo"),
    [
        (ReuseConfig, "capture", "captures"),
        (ReuseMethod, "drift", "dirft"),
        (SamplingParams, "seed", "sede"),
        (SamplingParams, "max_new_tokens", "max_tokens"),
        (NewVariants, "share", "shares"),
        (Audits, "share", "shares"),
    ],
)
def test_unknown_names_are_refused_with_the_right_one_and_settings_do_not_change(
    settings: Any, known: str, typo: str
) -> None:
    with pytest.raises(ConfigError, match="beta"):
        settings(beta=1)
    with pytest.raises(ConfigError, match=rf"{typo}: no such .*Did you mean {known}\?"):
        dataclasses.replace(settings(), **{typo: 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings(), known, 1)


def test_a_config_error_is_also_a_value_error() -> None:
    with pytest.raises(ValueError, match="alpha"):
        ReuseConfig(method=ReuseMethod(alpha=-1))


def test_settings_keep_what_a_generator_gives() -> None:
    sampling = SamplingParams(stop=(text for text in ("\n", "END")))  # type: ignore[arg-type]
    assert (sampling.stop, SamplingParams(stop=["a"]).stop) == (("\n", "END"), ("a",))  # type: ignore[arg-type]
