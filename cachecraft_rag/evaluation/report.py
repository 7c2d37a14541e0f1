"""The report: means over questions with paired bootstrap intervals, as numbers, as a table and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachecraft_rag.evaluation.intervals import Interval, mean_interval, paired_interval, share_interval
from cachecraft_rag.evaluation.measuring import NEAR_TIE, Record

Columns = Mapping[str, Sequence[Record]]  # label → its records, of the same questions in the same order
Value = Callable[[Sequence[Record], Columns], Interval | None]


@dataclass(frozen=True)
class Measure:
    """A column of the report.

    name     in JSON
    heading  in tables
    form     the format of its numbers
    meaning  how to read it
    value    one method's records, and those of all → the mean with its interval; None where there is none
    """

    name: str
    heading: str
    form: str
    meaning: str
    value: Value


def _mean(values: Sequence[float | None]) -> Interval | None:
    given = [value for value in values if value is not None]
    return mean_interval(given) if given else None


def _difference(name: str) -> Value:
    """A field minus full prefill's, question by question."""

    def value(found: Sequence[Record], _: Columns) -> Interval | None:
        pairs = [(getattr(record, name), getattr(record, f"reference_{name}")) for record in found]
        pairs = [pair for pair in pairs if None not in pair]
        return paired_interval(*zip(*pairs, strict=True)) if pairs else None

    return value


def _of_certain(found: Sequence[Record], *, full_right: bool) -> Interval | None:
    """Share of changed verdicts where full prefill is right, or wrong, and no near-tie."""
    there = [r for r in found if r.reference_right is full_right and not r.near_tie]
    return share_interval(sum(r.right is not full_right for r in there), len(there)) if there else None


def _ttft_ratio(found: Sequence[Record], _: Columns) -> Interval:
    """The geometric mean, so that one slow question does not dominate."""
    one = mean_interval([math.log(r.ttft_s / r.reference_ttft_s) for r in found])
    return Interval(math.exp(one.mean), math.exp(one.low), math.exp(one.high))


def _field(name: str) -> Value:
    return lambda found, _: _mean([getattr(record, name) for record in found])


_KL = (
    "of the next-token distributions, KL(full prefill ‖ method) in nats, over the tokens of full prefill's answer. "
    "0 means equal; small differences show here first."
)
_TOP1 = "share of the answer's positions at which the most likely token is the same."
_ROUGE = "(F1, with stems) of the method's own greedy answer against full prefill's."
_F1 = "of the answer against the gold answers, if the data has any."
_LOST = "share of the answers that are right with full prefill (they hold a gold answer) and wrong with the method."
_WON = "share of the answers that are wrong with full prefill and right with the method. Near-ties are in neither."
_RIGHT = "difference of the shares of right answers, question by question, near-ties included."
_TTFT = "time to the first token divided by full prefill's; geometric mean over questions."
MEASURES: tuple[Measure, ...] = (
    Measure("kl", "KL", ".4f", _KL, _field("kl")),
    Measure("top1", "top-1", ".3f", _TOP1, _field("top1")),
    Measure("rouge_l", "ROUGE-L", ".3f", _ROUGE, _field("rouge_l")),
    Measure("lost", "lost", ".2f", _LOST, lambda found, _: _of_certain(found, full_right=True)),
    Measure("won", "won", ".2f", _WON, lambda found, _: _of_certain(found, full_right=False)),
    Measure("right_difference", "right − full's", "+.3f", _RIGHT, _difference("right")),
    Measure("f1", "F1", ".3f", _F1, _field("f1")),
    Measure("f1_difference", "F1 − full's", "+.3f", "the difference, question by question.", _difference("f1")),
    Measure("ttft_ratio", "TTFT / full's", ".2f", _TTFT, _ttft_ratio),
    Measure(
        "recomputed", "computed", ".3f", "share of the chunks' tokens computed or recomputed.", _field("recomputed")
    ),
)


@dataclass(frozen=True)
class Report:
    """Each method's values by label, one for each measure.

    questions  number of questions that every method has answered; only these count
    near_ties  those of them in which full prefill wavers between two tokens
    full_right full prefill's right answers, near-ties left out, and of how many
    full_f1    F1 of full prefill's answers against the gold answers; None if there are none
    """

    methods: Mapping[str, tuple[Interval | None, ...]]
    measures: Sequence[Measure]
    ratios: Mapping[str, tuple[str, float | None]]
    questions: int
    near_ties: int
    full_right: tuple[int, int]
    full_f1: Interval | None

    def value(self, method: str, name: str) -> Interval | None:
        """One measure of the method with this label."""
        return dict(zip((measure.name for measure in self.measures), self.methods[method], strict=True))[name]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: each mean under its name, and its interval under `…_ci`."""
        methods: dict[str, Any] = {}
        for label, values in self.methods.items():
            name, ratio = self.ratios[label]
            methods[label] = {"method": name, "ratio": ratio}
            for measure, value in zip(self.measures, values, strict=True):
                methods[label] |= _plain(measure.name, value)
        return {
            "methods": methods,
            "questions": self.questions,
            "near_ties": self.near_ties,
            **_plain("full_f1", self.full_f1),
        }

    @property
    def headings(self) -> tuple[str, ...]:
        """Above the columns of `rows`."""
        return ("method", *(measure.heading for measure in self.measures))

    def rows(self, *, intervals: bool) -> list[tuple[str, ...]]:
        """One row per method: means, with their intervals in brackets where wanted."""
        return [
            (label, *(_shown(*pair, intervals=intervals) for pair in zip(values, self.measures, strict=True)))
            for label, values in self.methods.items()
        ]


def summarise(records: Sequence[Record], *, order: Sequence[str], measures: Sequence[Measure] = MEASURES) -> Report:
    """Aggregate the records, methods in this order. Raises ValueError if no question was answered by every method."""
    by_label: dict[str, dict[str, Record]] = {}
    for record in records:
        by_label.setdefault(record.label, {})[record.question_id] = record
    asked = dict.fromkeys(record.question_id for record in records)
    shared = [name for name in asked if all(name in by for by in by_label.values())]
    if not shared:
        raise ValueError("no question was answered by every method")
    columns = {label: [by[question] for question in shared] for label, by in by_label.items()}
    ratios = {label: (found[0].method, found[0].ratio) for label, found in columns.items()}
    places = {name: place for place, name in enumerate(order)}
    ordered = sorted(columns, key=lambda label: (places.get(ratios[label][0], len(places)), ratios[label][1] or 0.0))
    certain = [one for one in columns[ordered[0]] if one.reference_right is not None and not one.near_tie]
    return Report(
        {label: tuple(measure.value(columns[label], columns) for measure in measures) for label in ordered},
        measures,
        ratios,
        len(shared),
        sum(record.near_tie for record in columns[ordered[0]]),
        (sum(bool(one.reference_right) for one in certain), len(certain)),
        _mean([record.reference_f1 for record in columns[ordered[0]]]),
    )


def markdown(report: Report, settings: Mapping[str, Any], figures: Sequence[str] = ()) -> str:
    """The report as a Markdown page; `figures` are paths relative to it."""
    about = {name: value for name, value in settings.items() if not isinstance(value, dict) and value is not None}
    gold = "The data has no gold answers, so none is right or wrong, and there is no F1."
    if report.full_f1 is not None:
        f1 = report.full_f1
        right, asked = report.full_right
        gold = (
            f"Full prefill's own answers: F1 {f1.mean:.3f} [{f1.low:.3f}, {f1.high:.3f}]; {right} of {asked} right. "
            f"{report.near_ties} questions are near-ties and not among these: full prefill's two likeliest tokens "
            f"once differ by less than {NEAR_TIE}, so what is right there is chance."
        )
    reading = "\n".join(f"- **{measure.heading}** {measure.meaning}" for measure in report.measures)
    parts = [
        "# Quality and time of reuse",
        f"Every method has answered {report.questions} questions. {gold}",
        _table(report.headings, report.rows(intervals=True)),
        *(f"![{name.rpartition('.')[0]}]({name})" for name in figures),
        "## How to read it",
        "Full prefill answers each question first, then every method does. [ ] holds the 95 % interval of the mean "
        "over questions\n(10,000 bootstrap resamples, paired). `NAME@R` is the method NAME at the recompute ratio R.",
        reading,
        "## Settings",
        _table(("setting", "value"), [(name, str(value)) for name, value in about.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def _plain(name: str, value: Interval | None) -> dict[str, Any]:
    return {name: value and value.mean, f"{name}_ci": value and [value.low, value.high]}


def _shown(value: Interval | None, measure: Measure, *, intervals: bool) -> str:
    if value is None:
        return ""
    mean = f"{value.mean:{measure.form}}"
    return f"{mean} [{value.low:{measure.form}}, {value.high:{measure.form}}]" if intervals else mean


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in [headings, *lines]]
    rendered = [f"| {' | '.join(line)} |" for line in escaped]
    return "\n".join([rendered[0], f"|{' --- |' * len(headings)}", *rendered[1:]])
