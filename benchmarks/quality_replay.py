"""`python -m benchmarks quality-replay`: streams with a quality target, replayed from answers that are given once.

Nothing is captured while the questions are asked, so an answer depends on its question and its recompute ratio alone.
Each question is therefore answered and audited once with each of several ratios. From this table whole streams are
replayed: questions are drawn from it, the controller of the quality target chooses a ratio for each, and it learns of
the audit that belongs to it. A ratio between two of the table gets the answer of one of these, drawn so that the mean
lies on the line between them. The same questions with each fixed ratio are the comparison.

The table is a file of JSON lines, one for each question. A run that was interrupted or killed resumes, and questions
can be added. A table of another model, of other questions or of longer answers is refused.
"""

from __future__ import annotations

import bisect
import hashlib
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

from benchmarks.quality_target import (
    AnswerTokens,
    AuditedAnswer,
    Data,
    ModelDtype,
    Passages,
    StreamResult,
    StreamSettings,
    Target,
    agreement_of,
    ask,
    audited,
    stream_of,
)
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import numbers, print_json, print_table, progress_bar
from cachecraft_rag.engine.config import EngineTuning
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import Dataset, EvaluationQuestion
from cachecraft_rag.evaluation.origins import Origins, condition_named
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.self_check import load_checked
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.audits.controller import QualityTarget, RatioController
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.progress import Progress

# of one question: ratio → its audited answer
Answers = Mapping[float, AuditedAnswer]


@dataclass(frozen=True)
class TableRow:
    """One line of a table.

    question       digest of the question and its passages
    model          fingerprint of the model
    answer_tokens  longest answer that it could give, in tokens
    answers        its audited answers by ratio
    """

    question: str
    model: str
    answer_tokens: int
    answers: Answers

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Read a line. Raises ValueError, TypeError, KeyError or AttributeError for one of another file."""
        values = json.loads(line)
        answers = {
            float(ratio): AuditedAnswer(float(ratio), float(recomputed), int(tokens), int(agreeing))
            for ratio, (tokens, agreeing, recomputed) in values["answers"].items()
        }
        return cls(
            str(values["question"]), str(values["model"]), int(values["answer_tokens"]), answers
        )

    def line(self) -> str:
        """Return the row as a line of JSON."""
        answers = {
            str(ratio): [answer.tokens, answer.agreeing, answer.recomputed]
            for ratio, answer in self.answers.items()
        }
        return json.dumps(asdict(self) | {"answers": answers})


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

    Raises:
        ConfigError: the table was made with other ratios, another model, other questions or other lengths of answers,
            or is another file.
    """
    known = read_table(table)
    if known and set(known[0].answers) != set(ratios):
        have = ", ".join(map(str, sorted(known[0].answers)))
        raise ConfigError(f"{table} has the ratios {have}; ask with these, or name another file")
    for row, question in zip(known, dataset.questions, strict=False):
        wanted = (digest_of(question), decoder.fingerprint, answer_tokens)
        if (row.question, row.model, row.answer_tokens) != wanted:
            raise ConfigError(
                f"{table} was made with another model, other questions or passages, or other --answer-tokens; ask as "
                "it was made, or name another file"
            )
    missing = dataset.questions[len(known) :]
    _drop_cut_line(table)
    with (
        tempfile.TemporaryDirectory() as folder,
        ChunkCacheStore.open(folder) as store,
        table.open("a", encoding="utf-8") as lines,
        Engine(decoder, store, new_variants="off") as priming,
        Engine(
            decoder,
            store,
            new_variants="off",
            audit="idle",
            tuning=EngineTuning(decode_rows=len(ratios)),
            config=ReuseConfig.deterministic(),
        ) as engine,
        ThreadPoolExecutor(len(ratios)) as threads,
    ):
        # Documents are primed only now, so that a long run has its first rows soon.
        origins = Origins(condition_named("documents"), priming, dataset, seed, answer_tokens)
        for number, question in enumerate(missing, len(known) + 1):
            origins.before(question)
            asking = [
                threads.submit(ask, engine, question, answer_tokens, ratio) for ratio in ratios
            ]
            requests = [request.result() for request in asking]
            engine.settle()
            answers = {
                ratio: audited(engine, question, request_id, ratio)
                for ratio, request_id in zip(ratios, requests, strict=True)
            }
            row = TableRow(digest_of(question), decoder.fingerprint, answer_tokens, answers)
            print(row.line(), file=lines, flush=True)
            progress(Progress(number, len(dataset.questions), "Asking"))


def digest_of(question: EvaluationQuestion) -> str:
    """Return a digest of a question and its passages, in their order."""
    texts = (question.text, *(passage.text for passage in question.passages))
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()


def read_table(path: Path) -> list[TableRow]:
    """Return the rows of a table; [] without a file. A last line that was cut by a kill is left out.

    Raises:
        ConfigError: a line of the file is not one of such a table, or has other ratios than the first; or the file has
            text and no whole line.
    """
    if not path.exists():
        return []
    rows: list[TableRow] = []
    text = path.read_text(encoding="utf-8", errors="replace")
    whole, _, cut = text.rpartition("\n")
    if cut and not whole:
        raise ConfigError(
            f"{path} holds no whole line of a table of this command; delete it, or name another file"
        )
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = TableRow.from_line(line)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"line {number} of {path} is not one of a table of this command; name another file"
            ) from error
        if rows and row.answers.keys() != rows[0].answers.keys():
            raise ConfigError(
                f"{path} has other ratios in line {number} than in line 1; name another file"
            )
        rows.append(row)
    return rows


def _drop_cut_line(path: Path) -> None:
    """Remove a last line that was cut by a kill, so that the next one does not continue it."""
    if not path.exists():
        return
    written = path.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    if whole != written:
        with path.open("r+b") as file:
            file.truncate(len(whole))


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


def replay(questions: Sequence[Answers], target: float, dice: random.Random) -> StreamResult:
    """Return the stream of these questions with a quality target."""
    controller = RatioController(QualityTarget(target))
    answers = []
    for question in questions:
        ratio = controller.ratio
        given = answer_at(question, ratio, dice)
        controller.add(ratio, tokens=given.tokens, agreeing=given.agreeing)
        answers.append(AuditedAnswer(ratio, given.recomputed, given.tokens, given.agreeing))
    return StreamResult(None, tuple(answers))


def main(
    table: Annotated[Path, typer.Option("--table", help="File of the audited answers.")],
    data: Data = None,
    model: options.Model = "demo",
    dtype: ModelDtype = "auto",
    questions: Annotated[
        int, typer.Option("--questions", min=0, help="Questions to ask; 0 = those of the table.")
    ] = 240,
    ratios: Annotated[
        str, typer.Option("--ratios", help="Recompute ratios, each more than 0 and less than 1.")
    ] = "0.15,0.3,0.5,0.6,0.7,0.8",
    target: Target = 0.98,
    requests: Annotated[
        int, typer.Option("--requests", help="Questions in a stream, a multiple of ten.")
    ] = 400,
    orders: Annotated[int, typer.Option("--orders", min=1, help="Streams that are drawn.")] = 200,
    passages: Passages = 4,
    answer_tokens: AnswerTokens = 16,
    seed: Annotated[int, typer.Option("--seed", help="Seed of questions and orders.")] = 0,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Replay streams with a quality target in many orders, from answers that are given and audited once."""
    options.set_threads(threads)
    options.quiet_libraries()
    # checked before questions are asked, which takes long
    QualityTarget(target)
    settings = StreamSettings(target, requests, answer_tokens)
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
    comparison = compare([row.answers for row in rows], settings, orders=orders, seed=seed)
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
    def of(cls, streams: Sequence[StreamResult], settings: StreamSettings) -> Self:
        """Return the means over these streams."""
        whole = sorted(agreement_of(stream.answers) for stream in streams)
        margin = int(0.025 * len(whole))
        tenths = list(zip(*(stream.tenths(settings.requests) for stream in streams), strict=True))
        return cls(
            agreement=mean(whole),
            agreement_95=(whole[margin], whole[-1 - margin]),
            recomputed=mean(stream.recomputed for stream in streams),
            holds_in_every_tenth=mean(stream.holds(settings) for stream in streams),
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
    rows: Sequence[Answers], settings: StreamSettings, *, orders: int, seed: int
) -> Comparison:
    """Draw streams from the questions of a table, and compare the quality target with each fixed ratio.

    Args:
        rows: ratio → answer for each question, at least one. They are drawn with replacement.
        settings: the target, and the number of questions in a stream.
        orders: number of streams.
    """
    controlled = []
    fixed: dict[float, list[StreamResult]] = {ratio: [] for ratio in sorted(rows[0])}
    cheaper = 0
    for number in range(orders):
        dice = random.Random(seed * orders + number)
        drawn = dice.choices(rows, k=settings.requests)
        stream = replay(drawn, settings.target, dice)
        controlled.append(stream)
        for ratio, streams in fixed.items():
            streams.append(StreamResult(ratio, tuple(row[ratio] for row in drawn)))
        holding = [
            streams[-1].recomputed for streams in fixed.values() if streams[-1].holds(settings)
        ]
        cheaper += stream.recomputed < min(holding, default=1.0)
    return Comparison(
        settings.target,
        questions=len(rows),
        requests=settings.requests,
        orders=orders,
        with_target=Summary.of(controlled, settings),
        fixed={ratio: Summary.of(streams, settings) for ratio, streams in fixed.items()},
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
