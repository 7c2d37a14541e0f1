"""The report: means and shares over questions with 95 % intervals, as numbers, as tables and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cachecraft_rag.evaluation.intervals import (
    Interval,
    mean_interval,
    paired_interval,
    share_interval,
)
from cachecraft_rag.evaluation.measuring import NEAR_TIE, Record


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over questions with its 95 % interval.

    count  the number of questions
    hits   for a share: the number of questions counted; None for other means
    """

    interval: Interval
    count: int
    hits: int | None = None

    @property
    def mean(self) -> float:
        """The mean, or the share."""
        return self.interval.mean

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval, in the unit of the mean."""
        return self.interval.low

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval, in the unit of the mean."""
        return self.interval.high


# label → its records, of the same questions in the same order
Columns = Mapping[str, Sequence[Record]]
Value = Callable[[Sequence[Record], Columns], Estimate | None]


@dataclass(frozen=True)
class Measure:
    """A column of the report.

    name     in JSON
    heading  in tables
    form     the format of its numbers
    meaning  how to read it
    value    one method's records, and those of all methods → the estimate; None without questions to estimate from
    """

    name: str
    heading: str
    form: str
    meaning: str
    value: Value


def share(hits: int, count: int) -> Estimate | None:
    """Return the share hits / count of questions with its interval; None if `count` is 0."""
    return Estimate(share_interval(hits, count), count, hits) if count else None


def _mean(values: Sequence[float | None]) -> Estimate | None:
    given = [value for value in values if value is not None]
    return Estimate(mean_interval(given), len(given)) if given else None


def _difference(name: str) -> Value:
    """A field minus full prefill's, question by question."""

    def value(records: Sequence[Record], _: Columns) -> Estimate | None:
        pairs = [
            (getattr(record, name), getattr(record, f"reference_{name}")) for record in records
        ]
        pairs = [pair for pair in pairs if None not in pair]
        return Estimate(paired_interval(*zip(*pairs, strict=True)), len(pairs)) if pairs else None

    return value


def _right(records: Sequence[Record], _: Columns) -> Estimate | None:
    judged = [record for record in records if record.right is not None]
    return share(sum(bool(record.right) for record in judged), len(judged))


def _full_right(records: Sequence[Record]) -> Estimate | None:
    judged = [record for record in records if record.reference_right is not None]
    return share(sum(bool(record.reference_right) for record in judged), len(judged))


def _lost(records: Sequence[Record], _: Columns) -> Estimate | None:
    full_right = [record for record in records if record.reference_right is True]
    return share(sum(record.is_lost for record in full_right), len(full_right))


def _lost_net(records: Sequence[Record], _: Columns) -> Estimate | None:
    full_right = [record for record in records if record.reference_right is True]
    lost = sum(record.is_lost and not record.is_near_tie for record in full_right)
    return share(lost, len(full_right))


def _won(records: Sequence[Record], _: Columns) -> Estimate | None:
    full_wrong = [record for record in records if record.reference_right is False]
    return share(sum(record.is_won for record in full_wrong), len(full_wrong))


def _ttft_ratio(records: Sequence[Record], _: Columns) -> Estimate:
    """The geometric mean, so that one slow question does not dominate."""
    logarithms = mean_interval(
        [math.log(record.ttft_s / record.reference_ttft_s) for record in records]
    )
    interval = Interval(
        math.exp(logarithms.mean), math.exp(logarithms.low), math.exp(logarithms.high)
    )
    return Estimate(interval, len(records))


def _field(name: str) -> Value:
    return lambda records, _: _mean([getattr(record, name) for record in records])


_KL = (
    "of the next-token distributions, KL(full prefill ‖ method) in nats, over the tokens of full prefill's answer. "
    "0 means equal; small differences show here first."
)
_TOP1 = "share of the answer's positions at which the most likely token is the same."
_ROUGE = "(F1, with stems) of the method's own greedy answer against full prefill's."
_F1 = "of the answer against the gold answers, if the data has any."
_RIGHT = "answers that hold a gold answer, of all questions that have gold answers."
_LOST = "answers that are wrong with the method, of those that are right with full prefill."
_LOST_NET = (
    "the same without near ties: lost answers that depart from full prefill's at a token for which its two highest "
    f"probabilities differ by at least {NEAR_TIE:g}."
)
_WON = "answers that are right with the method, of those that are wrong with full prefill. Near ties are included."
_RIGHT_DIFFERENCE = (
    "difference of the shares of right answers, question by question. Near ties are included."
)
_TTFT = "time to the first token divided by full prefill's; geometric mean over questions."
ANSWER_MEASURES: tuple[Measure, ...] = (
    Measure("right", "right", ".2f", _RIGHT, _right),
    Measure("lost", "lost", ".2f", _LOST, _lost),
    Measure("lost_net", "lost net of near ties", ".2f", _LOST_NET, _lost_net),
    Measure("won", "won", ".2f", _WON, _won),
    Measure("right_difference", "right − full's", "+.3f", _RIGHT_DIFFERENCE, _difference("right")),
)
MEASURES: tuple[Measure, ...] = (
    Measure("kl", "KL", ".4f", _KL, _field("kl")),
    Measure("top1", "top-1", ".3f", _TOP1, _field("top1")),
    Measure("rouge_l", "ROUGE-L", ".3f", _ROUGE, _field("rouge_l")),
    Measure("f1", "F1", ".3f", _F1, _field("f1")),
    Measure(
        "f1_difference",
        "F1 − full's",
        "+.3f",
        "the difference, question by question.",
        _difference("f1"),
    ),
    Measure("ttft_ratio", "TTFT / full's", ".2f", _TTFT, _ttft_ratio),
    Measure(
        "recomputed",
        "computed",
        ".3f",
        "share of the chunks' tokens computed or recomputed.",
        _field("recomputed"),
    ),
)


@dataclass(frozen=True)
class Report:
    """Each method's estimates by label, one for each measure; in tables "0.12 [0.05, 0.28]", "4 of 32: …" or "" (none).

    methods     label → name of a measure → its estimate, None without questions to estimate from; in the report's order
    measures    of every question; `ANSWER_MEASURES` are kept apart, because they need gold answers
    ratios      label → name of the method and its recompute ratio, None without one
    questions   number of questions that every method has answered; only these count
    full_right  full prefill's right answers; None if no question has gold answers
    full_f1     F1 of full prefill's answers against the gold answers; None if there are none
    """

    methods: Mapping[str, Mapping[str, Estimate | None]]
    measures: Sequence[Measure]
    ratios: Mapping[str, tuple[str, float | None]]
    questions: int
    full_right: Estimate | None
    full_f1: Estimate | None

    def value(self, method: str, name: str) -> Estimate | None:
        """Return a measure, by its name in JSON, of a label, as in `methods`; KeyError if either is unknown."""
        return self.methods[method][name]

    def as_dict(self) -> dict[str, object]:
        """Return plain values for JSON: each mean under its name, its interval under `…_ci`, its questions under `…_n`.

        Shares also have the number of questions counted, under `…_hits`; for a missing estimate, mean and interval are
        None and the number is 0. "methods" maps each label to such values, with the "method" and its "ratio"; beside it
        are "questions", "near_tie_margin", and full prefill's "full_right" and "full_f1".
        """
        methods: dict[str, dict[str, object]] = {}
        for label, estimates in self.methods.items():
            name, ratio = self.ratios[label]
            methods[label] = {"method": name, "ratio": ratio}
            for measure_name, estimate in estimates.items():
                methods[label] |= _plain(measure_name, estimate)
        return {
            "methods": methods,
            "questions": self.questions,
            "near_tie_margin": NEAR_TIE,
            **_plain("full_right", self.full_right),
            **_plain("full_f1", self.full_f1),
        }

    @property
    def headings(self) -> tuple[str, ...]:
        """Headings of the columns of `rows`, "method" first."""
        return ("method", *(measure.heading for measure in self.measures))

    @property
    def answer_headings(self) -> tuple[str, ...]:
        """Headings of the columns of `answer_rows`, "method" first."""
        return ("method", *(measure.heading for measure in ANSWER_MEASURES))

    def rows(self, *, intervals: bool) -> list[tuple[str, ...]]:
        """Return one row per label: it, then cells for `headings`, without `intervals` only the mean or "4 of 32"."""
        return self._rows(self.measures, intervals=intervals)

    def answer_rows(self, *, intervals: bool) -> list[tuple[str, ...]]:
        """Do the same as `rows` for `answer_headings` (right, lost, won …); empty if no question has gold answers."""
        if self.full_right is None:
            return []
        return self._rows(ANSWER_MEASURES, intervals=intervals)

    def _rows(self, measures: Sequence[Measure], *, intervals: bool) -> list[tuple[str, ...]]:
        rows = []
        for label, estimates in self.methods.items():
            cells = [
                _shown(estimates[measure.name], measure, intervals=intervals)
                for measure in measures
            ]
            rows.append((label, *cells))
        return rows


def summarise(
    records: Sequence[Record], *, order: Sequence[str], measures: Sequence[Measure] = MEASURES
) -> Report:
    """Aggregate the records of the questions that every method has answered; the last record of a question counts.

    A method at another recompute ratio is another one here. Methods are in the given `order` of names, others last,
    then by ratio, None first, ascending. ValueError if no question was answered by every method, or a measured value is
    not a finite number.
    """
    by_label: dict[str, dict[str, Record]] = {}
    for record in records:
        by_label.setdefault(record.label, {})[record.question_id] = record
    asked = dict.fromkeys(record.question_id for record in records)
    shared = [
        question
        for question in asked
        if all(question in answered for answered in by_label.values())
    ]
    if not shared:
        raise ValueError("no question was answered by every method")

    columns = {
        label: [answered[question] for question in shared] for label, answered in by_label.items()
    }
    ratios = {label: (column[0].method, column[0].ratio) for label, column in columns.items()}
    places = {name: place for place, name in enumerate(order)}
    ordered = sorted(
        columns,
        key=lambda label: (places.get(ratios[label][0], len(places)), ratios[label][1] or 0.0),
    )

    methods: dict[str, dict[str, Estimate | None]] = {}
    for label in ordered:
        column = columns[label]
        methods[label] = {
            measure.name: measure.value(column, columns)
            for measure in (*measures, *ANSWER_MEASURES)
        }
    first = columns[ordered[0]]  # full prefill's own answers are the same in every column
    return Report(
        methods=methods,
        measures=measures,
        ratios=ratios,
        questions=len(shared),
        full_right=_full_right(first),
        full_f1=_mean([record.reference_f1 for record in first]),
    )


def full_answers(report: Report) -> str:
    """Return a sentence: how many of full prefill's answers are right, and their F1; or that there are no gold ones."""
    if report.full_right is None:
        return "The data has no gold answers, so no answer is right or wrong, and there is no F1."
    right = report.full_right
    interval = f"[{right.low:.2f}, {right.high:.2f}]"
    sentence = f"Full prefill's own answers: {right.hits} of {right.count} right, {right.mean:.2f} {interval}"
    if report.full_f1 is not None:
        f1 = report.full_f1
        sentence += f"; F1 {f1.mean:.3f} [{f1.low:.3f}, {f1.high:.3f}]"
    return f"{sentence}."


def markdown(report: Report, settings: Mapping[str, object], figures: Sequence[str] = ()) -> str:
    """Return the report as a Markdown page, with a table of answers only if there are gold answers.

    `settings` are listed, except those that are None or dicts; `figures` are paths of images, with themselves without
    suffix as captions.
    """
    about = {
        name: value
        for name, value in settings.items()
        if not isinstance(value, dict) and value is not None
    }
    answer_rows = report.answer_rows(intervals=True)
    measures = (*(ANSWER_MEASURES if answer_rows else ()), *report.measures)
    reading = "\n".join(f"- **{measure.heading}** {measure.meaning}" for measure in measures)
    parts = [
        "# Quality and time of reuse",
        f"Every method has answered {report.questions} questions. {full_answers(report)}",
        *([_table(report.answer_headings, answer_rows)] if answer_rows else []),
        _table(report.headings, report.rows(intervals=True)),
        *(f"![{name.rpartition('.')[0]}]({name})" for name in figures),
        "## How to read it",
        "Full prefill answers each question first, then every method does. [ ] holds the 95 % interval: Wilson's for "
        "shares\n(“4 of 32”), else of the mean over questions (10,000 bootstrap resamples, paired). `NAME@R` is the "
        "method NAME at the\nrecompute ratio R; `default` without a ratio is the engine's own choice.",
        reading,
        "## Settings",
        _table(("setting", "value"), [(name, str(value)) for name, value in about.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def _plain(name: str, estimate: Estimate | None) -> dict[str, object]:
    if estimate is None:
        return {name: None, f"{name}_ci": None, f"{name}_n": 0}
    plain: dict[str, object] = {
        name: estimate.mean,
        f"{name}_ci": [estimate.low, estimate.high],
        f"{name}_n": estimate.count,
    }
    if estimate.hits is not None:
        plain[f"{name}_hits"] = estimate.hits
    return plain


def _shown(estimate: Estimate | None, measure: Measure, *, intervals: bool) -> str:
    if estimate is None:
        return ""
    mean = f"{estimate.mean:{measure.form}}"
    interval = f"[{estimate.low:{measure.form}}, {estimate.high:{measure.form}}]"
    if estimate.hits is None:
        return f"{mean} {interval}" if intervals else mean
    counted = f"{estimate.hits} of {estimate.count}"
    return f"{counted}: {mean} {interval}" if intervals else counted


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in [headings, *lines]]
    rendered = [f"| {' | '.join(line)} |" for line in escaped]
    return "\n".join([rendered[0], f"|{' --- |' * len(headings)}", *rendered[1:]])
