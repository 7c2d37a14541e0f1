"""The report: means over questions with paired bootstrap intervals, as numbers, as a table and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachecraft_rag.evaluation.quality.intervals import Interval, mean_interval, paired_interval, ratio_interval
from cachecraft_rag.evaluation.quality.measuring import Record, label
from cachecraft_rag.evaluation.quality.methods import ABLATIONS, METHODS
from cachecraft_rag.evaluation.quality.metrics import normalised_f1

PAPER = "craft"  # every method is compared with this one at the same ratio
NAIVE = "full_cache"
HEADINGS = (
    "method",
    "KL",
    "KL / craft",
    "top-1",
    "ROUGE-L",
    "F1",
    "F1 − full's",
    "Jaccard",
    "TTFT / full's",
    "computed",
)


@dataclass(frozen=True, slots=True)
class Versus:
    """A method's KL against that of the paper's selector at the same ratio; `ratio` is None if the latter is 0."""

    difference: Interval
    ratio: Interval | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One method at one ratio over all questions, see `Record`.

    f1, jaccard    over the questions with gold answers; None if there are none
    f1_difference  F1 minus full prefill's, paired by question
    normalised_f1  0 = F1 of full reuse, 1 = F1 of full prefill
    ttft_ratio     TTFT / full prefill's; the geometric mean, so that one slow question does not dominate
    """

    method: str
    ratio: float | None
    kl: Interval
    top1: Interval
    rouge_l: Interval
    f1: Interval | None
    f1_difference: Interval | None
    jaccard: Interval | None
    normalised_f1: float | None
    ttft_ratio: Interval
    recomputed: Interval
    kl_vs_craft: Versus | None

    @property
    def label(self) -> str:
        """`NAME@R`, or `NAME` without a ratio."""
        return label(self.method, self.ratio)

    def as_dict(self) -> dict[str, Any]:
        """Plain values: each mean under its name, and its interval under `…_ci`."""
        found: dict[str, Any] = {"method": self.method, "ratio": self.ratio, "normalised_f1": self.normalised_f1}
        for name in ("kl", "top1", "rouge_l", "f1", "f1_difference", "jaccard", "ttft_ratio", "recomputed"):
            found |= _plain(name, getattr(self, name))
        if self.kl_vs_craft is not None:
            found["kl_vs_craft"] = _plain("difference", self.kl_vs_craft.difference) | _plain(
                "ratio", self.kl_vs_craft.ratio
            )
        return found


@dataclass(frozen=True, slots=True)
class Report:
    """All methods by label, in the order of the registry, and full prefill's answers against the gold answers.

    questions  number of questions that every method has answered; only these count
    """

    methods: Mapping[str, Summary]
    questions: int
    full_f1: Interval | None
    full_jaccard: Interval | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "methods": {name: summary.as_dict() for name, summary in self.methods.items()},
            "questions": self.questions,
            **_plain("full_f1", self.full_f1),
            **_plain("full_jaccard", self.full_jaccard),
        }


def summarise(records: Sequence[Record]) -> Report:
    """Aggregate the records. Raises ValueError if no question was answered by every method."""
    by_label: dict[str, dict[str, Record]] = {}
    for record in records:
        by_label.setdefault(record.label, {})[record.question_id] = record
    shared = [
        name for name in dict.fromkeys(r.question_id for r in records) if all(name in by for by in by_label.values())
    ]
    columns = {name: [by[question] for question in shared] for name, by in by_label.items()}
    if not shared:
        raise ValueError("no question was answered by every method")
    places = {name: place for place, name in enumerate([*METHODS, *ABLATIONS])}
    order = sorted(
        columns, key=lambda name: (places.get(columns[name][0].method, len(places)), columns[name][0].ratio or 0.0)
    )
    any_column = columns[order[0]]
    return Report(
        {name: _summary(columns[name], columns) for name in order},
        len(shared),
        _mean([r.reference_f1 for r in any_column]),
        _mean([r.reference_jaccard for r in any_column]),
    )


def _summary(found: Sequence[Record], columns: Mapping[str, Sequence[Record]]) -> Summary:
    first = found[0]
    f1, full_f1 = [r.f1 for r in found], [r.reference_f1 for r in found]
    naive = [r.f1 for r in columns.get(NAIVE, ())]
    ttft = mean_interval([math.log(r.ttft_s / r.reference_ttft_s) for r in found])
    return Summary(
        method=first.method,
        ratio=first.ratio,
        kl=mean_interval([r.kl for r in found]),
        top1=mean_interval([r.top1 for r in found]),
        rouge_l=mean_interval([r.rouge_l for r in found]),
        f1=_mean(f1),
        f1_difference=paired_interval(_given(f1), _given(full_f1)) if _given(f1) else None,
        jaccard=_mean([r.jaccard for r in found]),
        normalised_f1=_normalised(_mean(f1), _mean(naive), _mean(full_f1)),
        ttft_ratio=Interval(math.exp(ttft.mean), math.exp(ttft.low), math.exp(ttft.high)),
        recomputed=mean_interval([r.recomputed for r in found]),
        kl_vs_craft=_versus(found, columns.get(label(PAPER, first.ratio))) if first.ratio is not None else None,
    )


def _versus(found: Sequence[Record], paper: Sequence[Record] | None) -> Versus | None:
    if paper is None:
        return None
    own, theirs = [r.kl for r in found], [r.kl for r in paper]
    return Versus(paired_interval(own, theirs), ratio_interval(own, theirs) if sum(theirs) > 0 else None)


def _normalised(f1: Interval | None, naive: Interval | None, full: Interval | None) -> float | None:
    if f1 is None or naive is None or full is None:
        return None
    return normalised_f1(f1.mean, full_reuse=naive.mean, full_prefill=full.mean)


def _given(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float | None]) -> Interval | None:
    given = _given(values)
    return mean_interval(given) if given else None


def _plain(name: str, value: Interval | None) -> dict[str, Any]:
    if value is None:
        return {name: None, f"{name}_ci": None}
    return {name: value.mean, f"{name}_ci": [value.low, value.high]}


def rows(report: Report) -> list[tuple[str, ...]]:
    """One row per method under `HEADINGS`: means, with their intervals in brackets."""
    return [(name, *(_shown(value, form) for value, form in _columns(one))) for name, one in report.methods.items()]


def short_rows(report: Report) -> list[tuple[str, ...]]:
    """The same without intervals, for a terminal."""
    return [
        (name, *(f"{value.mean:{form}}" if value is not None else "" for value, form in _columns(one)))
        for name, one in report.methods.items()
    ]


def _columns(one: Summary) -> list[tuple[Interval | None, str]]:
    """The values under `HEADINGS`, each with its number format."""
    versus = one.kl_vs_craft
    return [
        (one.kl, ".4f"),
        (versus.ratio if versus is not None else None, ".2f"),
        (one.top1, ".3f"),
        (one.rouge_l, ".3f"),
        (one.f1, ".3f"),
        (one.f1_difference, "+.3f"),
        (one.jaccard, ".3f"),
        (one.ttft_ratio, ".2f"),
        (one.recomputed, ".3f"),
    ]


def _shown(value: Interval | None, form: str) -> str:
    return "" if value is None else f"{value.mean:{form}} [{value.low:{form}}, {value.high:{form}}]"


_READING = """\
Full prefill answers each question first, then every method does. [ ] holds the 95 % interval of the mean over questions
(10,000 bootstrap resamples, all methods resampled together).

- **KL** of the next-token distributions, KL(full prefill ‖ method) in nats, over the tokens of full prefill's answer. 0
  means equal; small differences show here first. **KL / craft**: divided by the mean KL of the paper's selector at the
  same ratio.
- **top-1**: share of the answer's positions at which the most likely token is the same.
- **ROUGE-L** (F1, with stems) of the method's own greedy answer against full prefill's.
- **F1** and **Jaccard** of the answer against the gold answers, if the data has any. **F1 − full's**: the difference
  from full prefill's F1, question by question.
- **TTFT / full's**: time to the first token divided by full prefill's; geometric mean over questions. It includes a
  selector's probes and a compressor's work.
- **computed**: share of the chunks' tokens that was computed or recomputed. For compressors: the share that was kept.

`NAME@R` is the method NAME at the recompute ratio R; for compressors R is the share of the chunks to keep."""


def markdown(report: Report, settings: Mapping[str, Any], figures: Sequence[str]) -> str:
    """The report as a Markdown page; `figures` are paths relative to it."""
    about = {name: value for name, value in settings.items() if not isinstance(value, dict) and value is not None}
    parts = [
        "# Quality and time of reuse\n",
        f"Every method has answered {report.questions} questions.",
        _gold(report),
        _table(HEADINGS, rows(report)),
        *(f"![{name.rpartition('.')[0].replace('_', ' ')}]({name})\n" for name in figures),
        "## How to read it\n",
        _READING,
        "\n## Settings\n",
        _table(("setting", "value"), [(name, str(value)) for name, value in about.items()]),
    ]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _gold(report: Report) -> str:
    if report.full_f1 is None or report.full_jaccard is None:
        return "The data has no gold answers, so there is no F1.\n"
    return f"Full prefill's own answers: F1 {_shown(report.full_f1, '.3f')}, Jaccard {report.full_jaccard.mean:.3f}.\n"


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in [headings, *lines]]
    rendered = [f"| {' | '.join(line)} |" for line in escaped]
    return "\n".join([rendered[0], f"|{' --- |' * len(headings)}", *rendered[1:]]) + "\n"
