"""`python -m benchmarks rows`: what each recomputed row buys, in right answers, divergence and time.

Ways to spend recomputed rows are compared question by question, each with several recompute ratios. The scattered rows
are those of the selector "question". The nearest chunk is the one directly before the question. The probe decides which
chunks are in focus (`planning.early_termination`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from benchmarks import formats
from benchmarks.methods import ABLATIONS
from cachecraft_rag.checks import check_choice
from cachecraft_rag.cli import options
from cachecraft_rag.cli.evaluation.evaluate import (
    Measuring,
    Questions,
    require_packages,
    show_report,
)
from cachecraft_rag.cli.options import takes
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import Dataset
from cachecraft_rag.evaluation.intervals import paired_interval
from cachecraft_rag.evaluation.lookalikes import NAME as LOOKALIKES
from cachecraft_rag.evaluation.measuring import METHODS as USERS
from cachecraft_rag.evaluation.measuring import PLAIN, Method, Record, Trial, label, methods_named
from cachecraft_rag.evaluation.origins import condition_named
from cachecraft_rag.evaluation.report import MEASURES, Columns, Estimate, Measure, summarise
from cachecraft_rag.planning import planner
from cachecraft_rag.planning.config import DEFAULT_ALPHA, ReuseConfig
from cachecraft_rag.planning.early_termination import focus_score
from cachecraft_rag.planning.selectors import TokenFacts

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.dataset import EvaluationQuestion
    from cachecraft_rag.types.documents import Chunk

Order = Literal["given", "rotated", "retrieved"]
BASELINE = ("nearest", 0.15)  # what the answers of the other methods are paired with


def focused_in_full(facts: Sequence[TokenFacts], budgets: Sequence[int]) -> list[int]:
    """Return the budgets, but all tokens for the chunk with the highest focus score; before the probe, no change."""
    scores = [0.0 if chunk.probed is None else focus_score(chunk.probed) for chunk in facts]
    most = max(scores, default=0.0)
    return [
        chunk.tokens if score == most > 0.0 else budget
        for chunk, score, budget in zip(facts, scores, budgets, strict=True)
    ]


@contextmanager
def focused(_: Engine, question: EvaluationQuestion, __: float) -> Iterator[Sequence[Chunk]]:
    """Recompute the chunk with the highest focus score in full, and the budget of each other chunk in that chunk."""
    before = planner.select

    def select(
        facts: Sequence[TokenFacts], budgets: Sequence[int], *given: Any, **named: Any
    ) -> list[np.ndarray]:
        # one budget for all would be spent on the best tokens of all chunks
        return before(
            facts, focused_in_full(facts, budgets), *given, **named | {"budget_scope": "chunk"}
        )

    planner.select = select
    try:
        yield question.passages
    finally:
        planner.select = before


def _only_in_focus(ratio: float) -> ReuseConfig:
    return replace(PLAIN.with_method(early_termination="probe"), recompute_ratio=ratio)


def _by_cfo(nearest_share: float, _: float) -> ReuseConfig:
    return replace(PLAIN.with_method(alpha=DEFAULT_ALPHA), nearest_share=nearest_share)


_SCATTERED, _NEAREST = ABLATIONS["scattered"], ABLATIONS["nearest"]
_WAYS = (
    USERS["full_cache"],
    _SCATTERED,
    _NEAREST,
    Method("cfo", "eq. 12", partial(_by_cfo, 0.0)),
    Method("cfo_nearest", "eq. 12", partial(_by_cfo, _NEAREST.config(0.0).nearest_share)),
    replace(_SCATTERED, name="focused", prepare=focused),
    Method("only_in_focus", "this package", _only_in_focus, takes_ratio=True),
)
WAYS: Mapping[str, Method] = {way.name: way for way in _WAYS}


def chosen(names: str) -> list[Method]:
    """The ways of a comma-separated list; `NAME@R` is the way NAME at the recompute ratio R alone.

    Raises:
        ConfigError: a name is unknown, or a ratio is no number.
    """
    ways = []
    for text in names.split(","):
        name, at, ratio = text.strip().partition("@")
        (way,) = methods_named([name], WAYS)
        if at:
            (value,) = options.numbers(ratio)
            way = replace(
                way,
                name=text.strip(),
                config=partial(_at, Trial(way, value)),
                takes_ratio=False,
            )
        ways.append(way)
    return ways


def _at(trial: Trial, _: float) -> ReuseConfig:
    return trial.config


def rotated(dataset: Dataset) -> Dataset:
    """The look-alike pages with the page that holds the answer in each place equally often.

    The other pages keep their order. Question n has its page in place n modulo the number of passages.

    Raises:
        ConfigError: the questions are not those of the look-alike pages.
    """
    if not dataset.name.startswith(LOOKALIKES):
        raise ConfigError(f"--order rotated is for --data {LOOKALIKES}, not for {dataset.name}")
    asked = []
    for number, question in enumerate(dataset.questions):
        page = f"{question.question_id.rpartition('#')[0]}.md"
        answer = next(
            passage for passage in question.passages if passage.metadata["source"] == page
        )
        passages = [passage for passage in question.passages if passage is not answer]
        passages.insert(number % len(question.passages), answer)
        asked.append(replace(question, passages=tuple(passages)))
    return replace(dataset, questions=tuple(asked))


def retrieved(dataset: Dataset) -> Dataset:
    """Each question with the chunks that the bundled embedding model finds among all, the best last.

    There are as many as before; the one that holds the answer may be missing.
    """
    from cachecraft_rag.retrievers.embeddings import Embedder

    embedder = Embedder()
    chunks = [chunk for document in dataset.documents for chunk in document]
    vectors = embedder.encode_document([chunk.text for chunk in chunks])
    asked = []
    for question in dataset.questions:
        query = embedder.encode_query([question.text])[0]
        best = (vectors @ query).argsort(kind="stable")[-len(question.passages) :]
        asked.append(replace(question, passages=tuple(chunks[place] for place in best)))
    return replace(dataset, questions=tuple(asked))


ORDERS: Mapping[str, Callable[[Dataset], Dataset]] = {
    "given": lambda dataset: dataset,
    "rotated": rotated,
    "retrieved": retrieved,
}


def _right_of_baseline(records: Sequence[Record], columns: Columns) -> Estimate | None:
    baseline = columns.get(label(*BASELINE))
    if baseline is None:
        return None
    pairs = [
        (float(record.right), float(base.right))
        for record, base in zip(records, baseline, strict=True)
        if record.right is not None and base.right is not None
    ]
    return Estimate(paired_interval(*zip(*pairs, strict=True)), len(pairs)) if pairs else None


def _kl_of_baseline(records: Sequence[Record], columns: Columns) -> Estimate | None:
    baseline = columns.get(label(*BASELINE))
    if baseline is None:
        return None
    interval = paired_interval(
        [record.kl for record in records], [record.kl for record in baseline]
    )
    return Estimate(interval, len(records))


PAIRED = (
    Measure(
        "right_minus_baseline",
        f"right − {label(*BASELINE)}'s",
        "+.3f",
        "difference of the shares of right answers, question by question.",
        _right_of_baseline,
    ),
    Measure(
        "kl_minus_baseline",
        f"KL − {label(*BASELINE)}'s",
        "+.4f",
        "paired by question.",
        _kl_of_baseline,
    ),
)


@dataclass(frozen=True)
class Comparing:
    """Options: what is compared, and where the answer's passage is.

    ways   comma-separated: full_cache (nothing recomputed), scattered, nearest (that chunk in full too), cfo (by CFO),
           cfo_nearest (both), focused (the chunk that the question attends to most in full, too), only_in_focus
           (nothing of chunks out of focus); without this option all. A way with a ratio, such as nearest@0.15, runs at
           this ratio only, others at all of --ratios
    order  of the passages. given: as in the data. rotated: the look-alike page with the answer in each place equally
           often. retrieved: those that the bundled embedding model finds, the best last
    """

    ways: str | None = None
    order: str = "given"

    def __post_init__(self) -> None:
        """Check the order; raises ConfigError."""
        check_choice("--order", self.order, get_args(Order))


@takes(
    comparing=Comparing,
    questions=Questions,
    measuring=Measuring,
    defaults={"ratios": "0.05,0.1,0.15,0.2,0.3", "answer_tokens": 20},
)
def main(
    threads: options.Threads = None,
    as_json: options.Json = False,
    *,
    comparing: Comparing,
    questions: Questions,
    measuring: Measuring,
) -> None:
    """Compare ways to spend recomputed rows with full prefill, question by question.

    The column "computed" has the share of the chunks' tokens that was recomputed. Writes report.md to --out. After
    Ctrl-C, the same command resumes; with a larger --limit, use another --out.
    """
    options.set_threads(threads)
    require_packages()
    dataset = ORDERS[comparing.order](questions.load(formats.read))
    ways = chosen(comparing.ways) if comparing.ways else list(WAYS.values())
    described, records = measuring.run(
        dataset, questions, ways, origin=condition_named(measuring.origin)
    )
    report = summarise(records, order=list(WAYS), measures=(*MEASURES, *PAIRED))
    described["order"] = comparing.order
    show_report(report, described, measuring.out, as_json=as_json)
