"""The report against measurements whose numbers are worked out by hand."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from cachecraft_rag.evaluation.measuring import Record
from cachecraft_rag.evaluation.report import MEASURES, Report, markdown, summarise


def record(
    question: str, method: str, ratio: float | None, kl: float, *, ttft: float, f1: float | None
) -> Record:
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
        reference_f1=0.8 if has else None,
        ttft_s=ttft,
        reference_ttft_s=2.0,
        recomputed=ratio or 0.0,
        text="",
        right=f1 > 0.6 if f1 is not None else None,
        reference_right=question == "a" if has else None,
    )


RECORDS = [
    record("a", "default", 0.15, 0.1, ttft=0.5, f1=0.7),
    record("b", "default", 0.15, 0.3, ttft=2.0, f1=0.5),
    record("a", "full_cache", None, 0.6, ttft=0.2, f1=0.2),
    record("b", "full_cache", None, 0.8, ttft=0.2, f1=0.4),
    record("a", "leading", 0.3, 0.1, ttft=1.0, f1=0.8),
    record("b", "leading", 0.3, 0.1, ttft=1.0, f1=0.8),
    record("b", "leading", 0.15, 0.6, ttft=1.0, f1=0.6),
    record("a", "leading", 0.15, 0.2, ttft=1.0, f1=0.6),
]


def summarised(records: list[Record]) -> Report:
    return summarise(records, order=["full_cache", "leading", "default"])


@pytest.fixture(scope="module")
def report() -> Report:
    return summarised(RECORDS)


def test_methods_stand_in_the_registry_s_order(report: Report) -> None:
    assert list(report.methods) == ["full_cache", "leading@0.15", "leading@0.3", "default@0.15"]
    assert report.questions == 2


def test_means_by_hand(report: Report) -> None:
    expected = {
        "kl": 0.2,
        "top1": 0.8,
        "rouge_l": 0.9,
        "f1": 0.6,
        "f1_difference": -0.2,
        "recomputed": 0.15,
    }
    expected["ttft_ratio"] = math.sqrt(0.25 * 1.0)
    assert expected.keys() == {measure.name for measure in MEASURES}
    for name, mean in expected.items():
        found = report.value("default@0.15", name)
        assert found is not None
        assert found.mean == pytest.approx(mean), name
    assert report.full_f1 is not None
    assert report.full_f1.mean == pytest.approx(0.8)


def test_intervals_of_two_questions_reach_from_one_to_the_other(report: Report) -> None:
    kl, ttft = report.value("default@0.15", "kl"), report.value("default@0.15", "ttft_ratio")
    assert kl is not None
    assert ttft is not None
    assert (kl.low, kl.high) == (pytest.approx(0.1), pytest.approx(0.3))
    assert (ttft.low, ttft.high) == (pytest.approx(0.25), pytest.approx(1.0))


def test_only_questions_that_every_method_answered_count() -> None:
    assert (
        summarised([*RECORDS, record("c", "leading", 0.15, 9.0, ttft=1.0, f1=0.0)]).questions == 2
    )
    with pytest.raises(ValueError, match="every method"):
        summarised([RECORDS[0], RECORDS[3]])


def test_without_gold_answers_there_is_no_f1() -> None:
    without = {"f1": None, "reference_f1": None, "right": None, "reference_right": None}
    bare = summarised([replace(made, **without) for made in RECORDS])
    found = bare.as_dict()["methods"]["default@0.15"]
    assert [found[name] for name in ("f1", "f1_ci", "f1_difference", "right", "lost_net")] == [
        None
    ] * 5
    assert bare.answer_rows(intervals=True) == []
    assert "no gold answers" in markdown(bare, {})


def test_questions_without_gold_answers_count_for_the_rest() -> None:
    one = record("c", "leading", 0.15, 0.4, ttft=1.0, f1=None)
    mixed = summarised([*(r for r in RECORDS if (r.method, r.ratio) == ("leading", 0.15)), one])
    assert mixed.questions == 3
    f1 = mixed.value("leading@0.15", "f1")
    assert f1 is not None
    assert f1.mean == pytest.approx(0.6)


def test_as_dict_has_what_scripts_need(report: Report) -> None:
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert found["questions"] == 2
    one = found["methods"]["leading@0.15"]
    assert {"kl", "kl_ci", "top1", "rouge_l", "f1", "ttft_ratio", "recomputed"} <= set(one)
    assert (one["method"], one["ratio"], one["kl"]) == ("leading", 0.15, pytest.approx(0.4))
    assert one["kl_ci"] == [pytest.approx(0.2), pytest.approx(0.6)]


def test_tables_have_a_row_for_each_method(report: Report) -> None:
    for table in (report.rows(intervals=True), report.rows(intervals=False)):
        assert [row[0] for row in table] == list(report.methods)
        assert {len(row) for row in table} == {len(report.headings)}
    assert report.rows(intervals=True)[3][1] == "0.2000 [0.1000, 0.3000]"
    assert report.rows(intervals=False)[3][1] == "0.2000"


def test_markdown_shows_settings_figures_and_how_to_read_it(report: Report) -> None:
    page = markdown(
        report, {"model": "a|b", "warmup": None, "methods": {"default": {}}}, ["quality.png"]
    )
    assert "![quality](quality.png)" in page
    assert "| model | a\\|b |" in page
    assert "warmup" not in page
    assert all(f"- **{measure.heading}**" in page for measure in MEASURES)
    widths = {
        line.count(" | ")
        for line in page.splitlines()
        if re.match(r"\| (method|default|full_cache)", line)
    }
    assert widths == {len(report.headings) - 1, len(report.answer_headings) - 1}


def test_right_lost_and_won_answers_are_counted_with_intervals() -> None:
    def judged(name: str, right: bool, full: bool, margin: float | None = None) -> Record:
        made = record(name, "default", 0.15, 0.1, ttft=1.0, f1=0.5)
        return replace(made, right=right, reference_right=full, margin=margin)

    report = summarised(
        [
            judged("kept", True, True),
            judged("lost", False, True, margin=0.3),
            judged("lost in a near tie", False, True, margin=0.001),
            judged("won", True, False, margin=0.4),
            judged("wrong", False, False),
        ]
    )

    def counted(name: str) -> tuple[int | None, int]:
        estimate = report.value("default@0.15", name)
        assert estimate is not None
        assert 0 <= estimate.low < estimate.mean < estimate.high <= 1
        return estimate.hits, estimate.count

    assert counted("right") == (2, 5)
    assert counted("lost") == (2, 3)
    assert counted("lost_net") == (1, 3)
    assert counted("won") == (1, 2)
    assert report.full_right is not None
    assert (report.full_right.hits, report.full_right.count) == (3, 5)
    difference = report.value("default@0.15", "right_difference")
    assert difference is not None
    assert difference.mean == pytest.approx(-0.2)

    row = dict(zip(report.answer_headings, report.answer_rows(intervals=True)[0], strict=True))
    assert row["lost net of near ties"].startswith("1 of 3: 0.33 [")
    plain = report.as_dict()["methods"]["default@0.15"]
    assert (plain["lost_net_hits"], plain["lost_net_n"]) == (1, 3)
    assert plain["lost_net_ci"][1] > 0.5
    page = markdown(report, {})
    assert "3 of 5 right" in page
    assert "| default@0.15 | 2 of 5: 0.40 [" in page


def test_without_lost_answers_the_upper_bound_is_above_zero() -> None:
    kept = record("a", "default", 0.15, 0.1, ttft=1.0, f1=0.7)
    lost = summarised([kept]).value("default@0.15", "lost_net")
    assert lost is not None
    assert (lost.mean, lost.low) == (0.0, 0.0)
    assert lost.high > 0.5
