"""The quality report sums audits up as its columns say."""

from __future__ import annotations

import json

import pytest

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.intervals import share_interval
from cachecraft_rag.evaluation.quality import summarise_audits
from cachecraft_rag.serving.audits.audit import Audit


def audit(name: str, tokens: int, differences: tuple[int, ...] = (), **facts: object) -> Audit:
    given = {
        "selector": "question",
        "recomputed": 0.15,
        "origin": "primed",
        "outcomes": {"reused": 5},
    } | facts
    kl = 0.1 * len(differences)
    computed = {"computed_tokens": 100} | given
    return Audit(name, 0.0, tokens, differences, min(1, len(differences)), kl, **computed)  # type: ignore[arg-type]


AUDITS = [
    audit("a", 10),
    audit("b", 10, (0, 3)),
    audit("c", 20, (16,), origin="asked", recomputed=0.3),
    audit("d", 20, origin="mixed", recomputed=0.0, early=True),
    audit("e", 80, (64, 65, 79), selector="cache_craft"),
    audit("f", 30, origin="none", recomputed=0.0, computed_tokens=0, exact=True),
]


def test_shares_are_of_answers_and_of_tokens() -> None:
    report = summarise_audits(AUDITS)
    overall = report.overall
    assert report.exact == 1
    assert overall is not None
    assert overall.answers == 5
    assert overall.same == share_interval(2, 5)
    assert overall.agreement.mean == pytest.approx(1 - 6 / 140)
    assert overall.net.mean == pytest.approx(1 - 3 / 140)  # one near-tie in each of three answers
    assert overall.agreement.low <= overall.agreement.mean <= overall.agreement.high
    assert overall.kl.mean == pytest.approx(0.6 / 5)
    assert report.computed_tokens == 500


def test_answers_are_grouped_by_origin_selector_share_and_termination() -> None:
    report = summarise_audits(AUDITS)

    def counts(groups: object) -> dict[str, int]:
        return {group.name: group.answers for group in groups}  # type: ignore[attr-defined]

    assert counts(report.by_origin) == {"asked": 1, "mixed": 1, "primed": 3}
    assert counts(report.by_selector) == {"cache_craft": 1, "question": 4}
    assert counts(report.by_recomputed) == {"10% to 20%": 3, "20% to 30%": 1, "nothing": 1}
    assert counts(report.by_termination) == {"all layers": 4, "terminated early": 1}
    primed = next(group for group in report.by_origin if group.name == "primed")
    assert primed.agreement.mean == pytest.approx(1 - 5 / 100)


def test_agreement_by_place_counts_each_token_once() -> None:
    report = summarise_audits(AUDITS)
    rows = [
        (group.first, group.last, group.tokens, round(group.agreement, 6))
        for group in report.by_position
    ]
    assert rows == [
        (1, 1, 5, 0.8),
        (2, 4, 15, round(14 / 15, 6)),
        (5, 16, 6 + 6 + 3 * 12, 1.0),
        (17, 64, 4 + 4 + 48, round(55 / 56, 6)),
        (65, None, 16, round(13 / 16, 6)),
    ]
    assert sum(group.tokens for group in report.by_position) == 140


def test_the_worst_answers_come_first_and_equal_ones_are_not_listed() -> None:
    report = summarise_audits(AUDITS, worst=2)
    assert [entry.request_id for entry in report.worst] == ["b", "c"]
    everything = summarise_audits(AUDITS)
    assert [entry.request_id for entry in everything.worst] == ["b", "c", "e"]


def test_nothing_was_audited() -> None:
    report = summarise_audits([])
    assert (report.exact, report.overall, report.by_position, report.worst) == (0, None, (), ())


def test_a_large_store_has_almost_the_same_intervals_from_fewer_resamples() -> None:
    few = summarise_audits(AUDITS[:5] * 100).overall
    many = summarise_audits(AUDITS[:5] * 2000).overall
    assert few is not None
    assert many is not None
    assert many.agreement.mean == pytest.approx(few.agreement.mean)
    widths = [found.high - found.low for found in (few.agreement, many.agreement)]
    assert widths[0] / widths[1] == pytest.approx(20**0.5, rel=0.2)


def test_exact_answers_alone_are_only_counted() -> None:
    report = summarise_audits(AUDITS[-1:])
    assert (report.exact, report.overall, report.by_origin, report.worst) == (1, None, (), ())


def test_a_report_is_json() -> None:
    report = summarise_audits(AUDITS)
    values = json.loads(json.dumps(report.as_dict()))
    assert values["overall"]["answers"] == 5
    assert values["worst"][0]["agreement"] == pytest.approx(0.8)


def test_a_negative_number_of_worst_answers_is_refused() -> None:
    with pytest.raises(ConfigError, match="worst"):
        summarise_audits(AUDITS, worst=-1)
