"""`python -m benchmarks quality-replay`: streams with a quality target, replayed from answers that are given once.

Nothing is captured while the questions are asked, so an answer depends on its question and its recompute ratio alone.
Each question is therefore answered and audited once with each of several ratios. From this table whole streams are
replayed: questions are drawn from it, the controller of the quality target chooses a ratio for each, and it learns of
the audit that belongs to it. A ratio between two of the table gets the answer of one of these, drawn so that the mean
lies on the line between them. The same questions with each fixed ratio are the comparison.

The table is a file of JSON lines, one for each question. An interrupted run resumes, and questions can be added.
"""

from __future__ import annotations

import bisect
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Self

import typer

from benchmarks.quality_target import TENTHS, AuditedAnswer, agreement_of, stream_of
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import numbers, print_json, print_table, progress_bar
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import Dataset, EvaluationQuestion
from cachecraft_rag.evaluation.origins import Origins, condition_named
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.self_check import load_checked
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.audits.controller import QualityTarget, RatioController
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.progress import Progress

# of one question: ratio → its audited answer
Answers = Mapping[float, AuditedAnswer]


@dataclass(frozen=True)
class Replayed:
    """One stream.

    answers  in the order of the questions
    """

    answers: Sequence[AuditedAnswer]

    @property
    def tenths(self) -> list[Sequence[AuditedAnswer]]:
        """The answers in ten groups."""
        size = len(self.answers) // TENTHS
        return [self.answers[begin : begin + size] for begin in range(0, size * TENTHS, size)]

    @property
    def recomputed(self) -> float:
        """Mean share of the reused chunks' tokens that was recomputed."""
        return mean(answer.recomputed for answer in self.answers)

    def holds(self, target: float) -> bool:
        """Return True if every tenth of the stream has the target's agreement."""
        return min(map(agreement_of, self.tenths)) >= target


def measure(
    decoder: Decoder,
    dataset: Dataset,
    ratios: Sequence[float],
    table: Path,
    *,
    answer_tokens: int,
    seed: int,
    progress: Callable[[Progress], None],
) -> None:
    """Answer and audit each question with each ratio, and add what is missing in the table.

    The answers to one question are decoded together, and their audits share one full prefill.
    """
    done = len(read_table(table))
    with (
        tempfile.TemporaryDirectory() as folder,
        ChunkCacheStore.open(folder) as store,
        table.open("a", encoding="utf-8") as lines,
    ):
        with Engine(decoder, store, new_variants="off") as engine:
            origins = Origins(condition_named("documents"), engine, dataset, seed, answer_tokens)
            for number, question in enumerate(dataset.questions[done:]):
                origins.before(question)
                progress(Progress(number + 1, len(dataset.questions) - done, "Priming"))
        with (
            Engine(
                decoder,
                store,
                new_variants="off",
                audit="idle",
                decode_rows=len(ratios),
                config=ReuseConfig.deterministic(),
            ) as engine,
            ThreadPoolExecutor(len(ratios)) as threads,
        ):
            for number, question in enumerate(dataset.questions[done:], done):
                answers = _ask(engine, question, ratios, threads, answer_tokens)
                row = {
                    str(ratio): [answer.tokens, answer.agreeing, answer.recomputed]
                    for ratio, answer in answers.items()
                }
                print(json.dumps(row), file=lines, flush=True)
                progress(Progress(number + 1, len(dataset.questions), "Asking"))


def _ask(
    engine: Engine,
    question: EvaluationQuestion,
    ratios: Sequence[float],
    threads: ThreadPoolExecutor,
    answer_tokens: int,
) -> dict[float, AuditedAnswer]:
    def ask(ratio: float) -> str:
        answer = engine.stream(
            question.text,
            question.passages,
            sampling=SamplingParams(max_new_tokens=answer_tokens),
            config=ReuseConfig.deterministic(recompute_ratio=ratio),
        )
        for _ in answer:
            pass
        return answer.stats.request_id

    requests = list(threads.map(ask, ratios))
    engine.settle()
    answers = {}
    for ratio, request_id in zip(ratios, requests, strict=True):
        audit = engine.audit_of(request_id)
        if audit is None:
            raise ConfigError(f"the answer to {question.text!r} was not audited")
        answers[ratio] = AuditedAnswer(ratio, audit.recomputed, audit.tokens, audit.agreeing_net)
    return answers


def read_table(path: Path) -> list[dict[float, AuditedAnswer]]:
    """Return ratio → audited answer for each question of a table; [] without a file.

    Raises:
        ConfigError: a line of the file is not one of such a table, or has other ratios than the first.
    """
    if not path.exists():
        return []
    rows: list[dict[float, AuditedAnswer]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = {
                float(ratio): AuditedAnswer(float(ratio), float(recomputed), tokens, agreeing)
                for ratio, (tokens, agreeing, recomputed) in json.loads(line).items()
            }
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"line {number} of {path} is not one of a table of this command; name another file"
            ) from error
        if rows and row.keys() != rows[0].keys():
            raise ConfigError(
                f"{path} has other ratios in line {number} than in line 1; name another file"
            )
        rows.append(row)
    return rows


def answer_at(answers: Answers, ratio: float, dice: random.Random) -> AuditedAnswer:
    """Return the answer with a ratio, or one of those with the two ratios around it, drawn by their distance.

    Below the smallest ratio of the table it is that of the smallest. Above the largest one it is that of the largest,
    or an answer that agrees in full as with ratio 1.
    """
    known = sorted(answers)
    place = bisect.bisect_left(known, ratio)
    if place == 0:
        return answers[known[0]]
    below = known[place - 1]
    if place < len(known):
        above = known[place]
        nearer_above = dice.random() < (ratio - below) / (above - below)
        return answers[above if nearer_above else below]
    last = answers[below]
    if dice.random() < (ratio - below) / (1.0 - below):
        return AuditedAnswer(1.0, 1.0, last.tokens, last.tokens)
    return last


def replay(questions: Sequence[Answers], target: float, dice: random.Random) -> Replayed:
    """Return the stream of these questions with a quality target."""
    controller = RatioController(QualityTarget(target))
    answers = []
    for question in questions:
        ratio = controller.ratio
        given = answer_at(question, ratio, dice)
        controller.add(ratio, tokens=given.tokens, agreeing=given.agreeing)
        answers.append(AuditedAnswer(ratio, given.recomputed, given.tokens, given.agreeing))
    return Replayed(answers)


def main(
    table: Annotated[Path, typer.Option("--table", help="File of the audited answers.")],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="More questions with passages than the 240 about look-alike pages: a SQuAD or XQuAD file, or another "
            "known form.",
        ),
    ] = None,
    model: options.Model = "demo",
    dtype: Annotated[
        str, typer.Option(help="Number format of the model; auto is that of the checkpoint.")
    ] = "auto",
    questions: Annotated[
        int, typer.Option("--questions", min=0, help="Questions to ask; 0 = those of the table.")
    ] = 240,
    ratios: Annotated[
        str, typer.Option("--ratios", help="Recompute ratios, each more than 0 and less than 1.")
    ] = "0.15,0.3,0.5,0.6,0.7,0.8",
    target: Annotated[
        float, typer.Option(help="Share of the answers' tokens that should agree.")
    ] = 0.98,
    requests: Annotated[
        int, typer.Option("--requests", min=TENTHS, help="Questions in a stream.")
    ] = 400,
    orders: Annotated[int, typer.Option("--orders", min=1, help="Streams that are drawn.")] = 200,
    passages: Annotated[int, typer.Option("--passages", min=2, help="Chunks in each prompt.")] = 4,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Seed of questions and orders.")] = 0,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Replay streams with a quality target in many orders, from answers that are given and audited once."""
    options.set_threads(threads)
    options.quiet_libraries()
    wanted = sorted(numbers(ratios))
    if not wanted or wanted[0] <= 0 or wanted[-1] >= 1:
        raise ConfigError("--ratios must lie between 0 and 1, such as 0.15,0.5,0.8")
    if questions:
        dataset = stream_of(data, passages=passages, requests=questions, seed=seed)
        decoder = load_checked(model, dtype=dtype)
        with progress_bar("Asking", remaining=True) as show:
            measure(
                decoder,
                dataset,
                wanted,
                table,
                answer_tokens=answer_tokens,
                seed=seed,
                progress=show,
            )
    rows = read_table(table)
    if not rows:
        raise ConfigError(f"{table} holds no answers; ask some with --questions")
    comparison = compare(rows, target, requests=requests, orders=orders, seed=seed)
    if as_json:
        print_json(asdict(comparison))
    else:
        _print(comparison)


@dataclass(frozen=True)
class Summary:
    """Means over many streams.

    agreement             share of tokens that agree with full prefill
    agreement_95          between these lies the agreement of 95 % of the streams
    recomputed            share of the reused chunks' tokens that was recomputed
    holds_in_every_tenth  share of the streams in which every tenth has the target's agreement
    agreement_of_tenths   agreement of each tenth of a stream
    ratio_of_tenths       mean recompute ratio of each tenth
    """

    agreement: float
    agreement_95: tuple[float, float]
    recomputed: float
    holds_in_every_tenth: float
    agreement_of_tenths: tuple[float, ...]
    ratio_of_tenths: tuple[float, ...]

    @classmethod
    def of(cls, streams: Sequence[Replayed], target: float) -> Self:
        """Return the means over these streams."""
        whole = sorted(agreement_of(stream.answers) for stream in streams)
        margin = int(0.025 * len(whole))
        tenths = list(zip(*(stream.tenths for stream in streams), strict=True))
        return cls(
            agreement=mean(whole),
            agreement_95=(whole[margin], whole[-1 - margin]),
            recomputed=mean(stream.recomputed for stream in streams),
            holds_in_every_tenth=mean(stream.holds(target) for stream in streams),
            agreement_of_tenths=tuple(mean(map(agreement_of, same)) for same in tenths),
            ratio_of_tenths=tuple(
                mean(answer.ratio for tenth in same for answer in tenth) for same in tenths
            ),
        )


@dataclass(frozen=True)
class Comparison:
    """Streams with a quality target, and the same questions with fixed ratios.

    questions     number of questions in the table
    requests      number of questions in a stream
    orders        number of streams
    with_target   the streams with the quality target
    fixed         ratio → the streams with it
    cheaper       share of the streams in which the target recomputes less than the smallest fixed ratio that holds it
                  in every tenth; 1 counts as a fixed ratio that always does
    """

    target: float
    questions: int
    requests: int
    orders: int
    with_target: Summary
    fixed: Mapping[float, Summary]
    cheaper: float


def compare(
    rows: Sequence[Answers], target: float, *, requests: int, orders: int, seed: int
) -> Comparison:
    """Draw streams from the questions of a table, and compare the quality target with each fixed ratio.

    Args:
        rows: ratio → answer for each question, at least one.
        requests: questions in a stream, at least ten; drawn with replacement.
        orders: number of streams.
    """
    controlled = []
    fixed: dict[float, list[Replayed]] = {ratio: [] for ratio in sorted(rows[0])}
    cheaper = 0
    for number in range(orders):
        dice = random.Random(seed * orders + number)
        drawn = dice.choices(rows, k=requests)
        stream = replay(drawn, target, dice)
        controlled.append(stream)
        for ratio, streams in fixed.items():
            streams.append(Replayed([row[ratio] for row in drawn]))
        holding = [
            streams[-1].recomputed for streams in fixed.values() if streams[-1].holds(target)
        ]
        cheaper += stream.recomputed < min(holding, default=1.0)
    return Comparison(
        target,
        questions=len(rows),
        requests=requests,
        orders=orders,
        with_target=Summary.of(controlled, target),
        fixed={ratio: Summary.of(streams, target) for ratio, streams in fixed.items()},
        cheaper=cheaper / orders,
    )


def _print(comparison: Comparison) -> None:
    named = {"quality target": comparison.with_target}
    named |= {f"r = {ratio:g}": summary for ratio, summary in comparison.fixed.items()}
    rows = []
    for name, summary in named.items():
        low, high = summary.agreement_95
        rows.append(
            (
                name,
                f"{summary.agreement:.4f} [{low:.4f}, {high:.4f}]",
                f"{summary.recomputed:.3f}",
                f"{summary.holds_in_every_tenth:.0%}",
            )
        )
    print_table(
        (f"target {comparison.target:g}", "agreement", "recomputed", "every tenth holds"),
        rows,
        numbers=True,
    )
    out.print(
        f"{comparison.orders} streams of {comparison.requests} questions, drawn from {comparison.questions}; brackets "
        "hold 95 % of the streams. With the quality target, mean r and agreement of each tenth:",
        soft_wrap=True,
    )
    controlled = comparison.with_target
    for ratio, agreement in zip(
        controlled.ratio_of_tenths, controlled.agreement_of_tenths, strict=True
    ):
        out.print(f"  {ratio:.3f}  {agreement:.4f}")
    out.print(
        "The target recomputes less than the smallest fixed ratio that holds it in every tenth in "
        f"{comparison.cheaper:.0%} of the streams.",
        soft_wrap=True,
    )
