"""The report against measurements whose numbers are worked out by hand."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.quality.figures import draw
from cachecraft_rag.evaluation.quality.measuring import Record
from cachecraft_rag.evaluation.quality.report import HEADINGS, Report, markdown, rows, short_rows, summarise


def record(question: str, method: str, ratio: float | None, kl: float, *, ttft: float, f1: float | None) -> Record:
    """Full prefill takes 2 s and has an F1 of 0.8."""
    has = f1 is not None
    return Record(
        question_id=question,
        method=method,
        ratio=ratio,
        kl=kl,
        top1=1.0 - kl,
        rouge_l=1.0 - kl / 2,
        f1=f1,
        jaccard=f1 / 2 if f1 is not None else None,
        reference_f1=0.8 if has else None,
        reference_jaccard=0.4 if has else None,
        ttft_s=ttft,
        reference_ttft_s=2.0,
        recomputed=ratio or 0.0,
        text="",
    )


RECORDS = [
    record("a", "default", 0.15, 0.1, ttft=0.5, f1=0.7),
    record("b", "default", 0.15, 0.3, ttft=2.0, f1=0.5),
    record("a", "full_cache", None, 0.6, ttft=0.2, f1=0.2),
    record("b", "full_cache", None, 0.8, ttft=0.2, f1=0.4),
    record("a", "craft", 0.3, 0.1, ttft=1.0, f1=0.8),
    record("b", "craft", 0.3, 0.1, ttft=1.0, f1=0.8),
    record("b", "craft", 0.15, 0.6, ttft=1.0, f1=0.6),
    record("a", "craft", 0.15, 0.2, ttft=1.0, f1=0.6),
]


@pytest.fixture(scope="module")
def report() -> Report:
    return summarise(RECORDS)


def test_methods_stand_in_the_registry_s_order(report: Report) -> None:
    assert list(report.methods) == ["full_cache", "craft@0.15", "craft@0.3", "default@0.15"]
    assert report.questions == 2


def test_means_by_hand(report: Report) -> None:
    one = report.methods["default@0.15"]
    assert one.kl.mean == pytest.approx(0.2)
    assert one.top1.mean == pytest.approx(0.8)
    assert one.rouge_l.mean == pytest.approx(0.9)
    assert one.f1 is not None
    assert one.f1.mean == pytest.approx(0.6)
    assert one.f1_difference is not None
    assert one.f1_difference.mean == pytest.approx(-0.2)
    assert one.jaccard is not None
    assert one.jaccard.mean == pytest.approx(0.3)
    assert one.normalised_f1 == pytest.approx((0.6 - 0.3) / (0.8 - 0.3))  # full reuse 0.3, full prefill 0.8
    assert one.ttft_ratio.mean == pytest.approx(math.sqrt(0.25 * 1.0))
    assert one.recomputed.mean == pytest.approx(0.15)
    assert report.full_f1 is not None
    assert report.full_f1.mean == pytest.approx(0.8)


def test_intervals_of_two_questions_reach_from_one_to_the_other(report: Report) -> None:
    one = report.methods["default@0.15"]
    assert (one.kl.low, one.kl.high) == (pytest.approx(0.1), pytest.approx(0.3))
    assert (one.ttft_ratio.low, one.ttft_ratio.high) == (pytest.approx(0.25), pytest.approx(1.0))
    assert report.methods["craft@0.3"].kl.low == report.methods["craft@0.3"].kl.high


def test_against_the_paper_s_selector_pairs_are_of_the_same_question_and_ratio(report: Report) -> None:
    versus = report.methods["default@0.15"].kl_vs_craft
    assert versus is not None
    assert versus.ratio is not None
    # a: 0.1 of 0.2, b: 0.3 of 0.6. In every resample half, and differences of −0.1 and −0.3.
    assert [versus.ratio.low, versus.ratio.mean, versus.ratio.high] == pytest.approx([0.5, 0.5, 0.5])
    assert [versus.difference.low, versus.difference.mean, versus.difference.high] == pytest.approx([-0.3, -0.2, -0.1])
    assert report.methods["full_cache"].kl_vs_craft is None


def test_a_paper_s_selector_without_loss_has_no_ratio() -> None:
    exact = [replace(one, kl=0.0) if one.method == "craft" else one for one in RECORDS]
    versus = summarise(exact).methods["default@0.15"].kl_vs_craft
    assert versus is not None
    assert versus.ratio is None


def test_only_questions_that_every_method_answered_count() -> None:
    assert summarise([*RECORDS, record("c", "craft", 0.15, 9.0, ttft=1.0, f1=0.0)]).questions == 2
    with pytest.raises(ValueError, match="every method"):
        summarise([RECORDS[0], RECORDS[3]])


def test_without_gold_answers_there_is_no_f1() -> None:
    bare = summarise(
        [replace(one, f1=None, jaccard=None, reference_f1=None, reference_jaccard=None) for one in RECORDS]
    )
    found = bare.as_dict()["methods"]["default@0.15"]
    assert [found[name] for name in ("f1", "f1_ci", "f1_difference", "jaccard", "normalised_f1")] == [None] * 5
    assert "no gold answers" in markdown(bare, {}, [])


def test_questions_without_gold_answers_count_for_the_rest() -> None:
    one = record("c", "craft", 0.15, 0.4, ttft=1.0, f1=None)
    mixed = summarise([*(r for r in RECORDS if (r.method, r.ratio) == ("craft", 0.15)), one])
    assert mixed.questions == 3
    assert mixed.methods["craft@0.15"].f1 is not None
    assert mixed.methods["craft@0.15"].f1.mean == pytest.approx(0.6)


def test_as_dict_has_what_scripts_need(report: Report) -> None:
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert found["questions"] == 2
    craft = found["methods"]["craft@0.15"]
    assert {"kl", "kl_ci", "top1", "rouge_l", "f1", "ttft_ratio", "recomputed"} <= set(craft)
    assert craft["kl"] == pytest.approx(0.4)
    assert craft["kl_ci"] == [pytest.approx(0.2), pytest.approx(0.6)]
    assert found["methods"]["default@0.15"]["kl_vs_craft"]["ratio_ci"] == [pytest.approx(0.5), pytest.approx(0.5)]


def test_tables_have_a_row_for_each_method(report: Report) -> None:
    for table in (rows(report), short_rows(report)):
        assert [row[0] for row in table] == list(report.methods)
        assert {len(row) for row in table} == {len(HEADINGS)}
    assert rows(report)[3][1] == "0.2000 [0.1000, 0.3000]"
    assert short_rows(report)[3][1] == "0.2000"


def test_markdown_shows_settings_figures_and_how_to_read_it(report: Report) -> None:
    page = markdown(report, {"model": "a|b", "warmup": None, "methods": {"craft": {}}}, ["quality.png"])
    assert "![quality](quality.png)" in page
    assert "| model | a\\|b |" in page
    assert "warmup" not in page
    assert "## How to read it" in page
    widths = {line.count(" | ") for line in page.splitlines() if re.match(r"\| (method|craft|full_cache)", line)}
    assert widths == {len(HEADINGS) - 1}


@pytest.mark.parametrize(
    "records",
    [RECORDS, [replace(one, kl=0.0) for one in RECORDS], [replace(RECORDS[2], kl=0.0)], RECORDS[2:4]],
    ids=["all", "all exact", "one exact", "no ratio"],
)
def test_figures_are_written(tmp_path: Path, records: list[Record]) -> None:
    shown = summarise(records)
    assert draw(shown, tmp_path) == ["quality.png", "ttft.png"]
    for name in ("quality.png", "ttft.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_figures_that_cannot_be_written_say_so(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(report, tmp_path / "missing")
