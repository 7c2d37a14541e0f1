"""Overlap of attention in a prompt, and wrong answers of naive reuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.naive_reuse import summary
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.model.decoder import Decoder


def _answer(overlap: float, *, full: bool = True, naive: bool) -> dict[str, Any]:
    return {
        "overlap": overlap,
        "full_right": full,
        "naive_right": naive,
        "kl": overlap,
        "rouge_l": 1.0 if naive else 0.5,
    }


def test_overlap_that_tells_wrong_from_right_is_reported() -> None:
    told = [_answer(n / 100, naive=n < 20) for n in range(40)]
    found = summary([*told, _answer(0.9, full=False, naive=True)])
    assert found["right: full prefill"] == 40
    assert (found["right: both"], found["right: naive reuse"]) == (20, 21)
    assert found["wrong of the half with less overlap"]["wrong"] == 0
    assert found["wrong of the half with more overlap"]["wrong"] == 20
    assert found["difference"]["low"] > 0.1
    assert found["a wrong answer has more overlap than a right one"]["mean"] == 1.0
    assert found["overlap and KL"]["rho"] == pytest.approx(1.0)


def test_overlap_that_tells_nothing_has_an_interval_around_chance() -> None:
    found = summary([_answer(n / 100, naive=n % 2 == 0) for n in range(40)])
    chance = found["a wrong answer has more overlap than a right one"]
    assert chance["low"] < 0.5 < chance["high"]
    assert found["difference"]["low"] < 0 < found["difference"]["high"]


def test_without_a_wrong_answer_nothing_is_compared() -> None:
    found = summary([_answer(0.1, naive=True), _answer(0.2, naive=True)])
    assert "difference" not in found


@pytest.mark.usefixtures("as_loud_as_before")
def test_the_command_measures_and_resumes(
    tiny_decoder: Callable[..., Decoder],
    benchmark_json: Callable[..., Any],
    squad_article: Callable[..., Any],
    tmp_path: Path,
) -> None:
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(tmp_path / "model")
    decoder.tokenizer.save_pretrained(tmp_path / "model")
    towns = {"Arden": 1701, "Brook": 1802, "Corry": 1903}
    data = tmp_path / "squad.json"
    data.write_text(
        json.dumps(
            {"version": "1.1", "data": [squad_article(one, towns) for one in ("mill", "inn")]}
        )
    )
    asked = ("naive-reuse", "--model", tmp_path / "model", "--data", data, "--limit", "3")
    asked = (*asked, "--answer-tokens", "3", "--out", tmp_path / "out")
    first = benchmark_json(*asked)
    assert first["questions"] == 3
    lines = (tmp_path / "out" / "answers.jsonl").read_text("utf-8").splitlines()
    overlaps = [json.loads(line)[1]["overlap"] for line in lines[1:]]
    assert all(0 < overlap <= 1 for overlap in overlaps)
    (tmp_path / "out" / "answers.jsonl").write_text("\n".join(lines[:2]) + "\n", "utf-8")
    assert benchmark_json(*asked) == first
    with pytest.raises(ConfigError, match="two passages"):
        benchmark_json(*asked, "--passages", "3")
