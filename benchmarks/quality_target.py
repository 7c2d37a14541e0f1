"""`python -m benchmarks quality-target`: does a quality target hold on a stream of questions, and at what cost?

The same questions are asked in the same order with a quality target, and then with fixed recompute ratios from the
smallest on. After each answer the engine has time to audit it. A fixed ratio is given up at the first tenth of the
stream that misses the target, so the last ratio is the smallest one that holds it in every tenth. With `--to-the-end`
every fixed ratio answers every question, so that the whole stream can be compared.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import numbers, print_json, print_table, progress_bar
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import Dataset, EvaluationQuestion, load_dataset
from cachecraft_rag.evaluation.intervals import Interval, ratio_interval
from cachecraft_rag.evaluation.lookalikes import lookalikes_dataset
from cachecraft_rag.evaluation.origins import Origins, condition_named
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.self_check import load_checked
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.progress import Progress

TENTHS = 10


@dataclass(frozen=True)
class StreamSettings:
    """The questions of a stream, and what is asked of their answers.

    target         share of the answers' tokens that should agree with full prefill, near-ties included
    requests       number of questions, a multiple of ten
    answer_tokens  longest answer, in tokens
    to_the_end     a fixed ratio goes on after a tenth that misses the target
    """

    target: float
    requests: int
    answer_tokens: int
    to_the_end: bool = False

    def __post_init__(self) -> None:
        """Check the number of requests. Raises ConfigError."""
        if self.requests < TENTHS or self.requests % TENTHS:
            raise ConfigError(
                f"--requests must be a multiple of {TENTHS}, because results are given for each tenth of the stream, "
                f"not {self.requests}"
            )


@dataclass(frozen=True)
class AuditedAnswer:
    """One answer of a stream.

    ratio       the recompute ratio it was given with
    recomputed  share of the reused chunks' tokens that was recomputed: the ratio, and the nearest passage in full
    tokens      tokens of the answer
    agreeing    tokens of it that agree with full prefill, near-ties included
    """

    ratio: float
    recomputed: float
    tokens: int
    agreeing: int


@dataclass(frozen=True)
class StreamResult:
    """Audited answers with the quality target, or with a fixed recompute ratio.

    fixed_ratio  the ratio; None = chosen by the quality target
    answers      in the order of the questions; fewer than all if a tenth missed the target
    """

    fixed_ratio: float | None
    answers: tuple[AuditedAnswer, ...]

    @property
    def agreement(self) -> Interval:
        """Share of tokens that agree, with its 95 % interval over answers."""
        return ratio_interval(
            [answer.agreeing for answer in self.answers], [answer.tokens for answer in self.answers]
        )

    @property
    def mean_ratio(self) -> float:
        """Mean recompute ratio."""
        return sum(answer.ratio for answer in self.answers) / len(self.answers)

    @property
    def recomputed(self) -> float:
        """Mean share of the reused chunks' tokens that was recomputed."""
        return sum(answer.recomputed for answer in self.answers) / len(self.answers)

    def holds(self, settings: StreamSettings) -> bool:
        """Return True if every question was asked and every tenth of the stream held the target."""
        return len(self.answers) == settings.requests and all(
            agreement_of(tenth) >= settings.target for tenth in self.tenths(settings.requests)
        )

    def tenths(self, requests: int) -> list[list[AuditedAnswer]]:
        """Return the answers in groups of a tenth of `requests`; the last group may be incomplete."""
        size = requests // TENTHS
        return [
            list(self.answers[begin : begin + size]) for begin in range(0, len(self.answers), size)
        ]


def agreement_of(answers: Sequence[AuditedAnswer]) -> float:
    """Return the share of all tokens of the answers that agree with full prefill."""
    return sum(answer.agreeing for answer in answers) / sum(answer.tokens for answer in answers)


def stream_of(data: Path | None, *, passages: int, requests: int, seed: int) -> Dataset:
    """Return a stream: the questions of the look-alike set and those of a file, in random order.

    Raises:
        ConfigError: there are fewer questions than `requests`.
        DocumentError: the file cannot be read.
    """
    parts = [lookalikes_dataset(passages=passages, limit=None, seed=seed)]
    missing = requests - len(parts[0].questions)
    if missing > 0 and data is not None:
        parts.append(load_dataset(data, passages=passages, limit=missing, seed=seed))
    questions = [question for part in parts for question in part.questions]
    if len(questions) < requests:
        raise ConfigError(
            f"there are {len(questions)} questions; ask for fewer with --requests, or name a file of more with --data"
        )
    random.Random(seed).shuffle(questions)
    documents = tuple(document for part in parts for document in part.documents)
    return Dataset("stream", documents, tuple(questions[:requests]))


def measure(
    decoder: Decoder,
    dataset: Dataset,
    folder: Path,
    settings: StreamSettings,
    *,
    ratios: Sequence[float],
    seed: int,
    progress: Callable[[Progress], None],
) -> Iterator[StreamResult]:
    """Yield the result with the quality target, and then those with fixed ratios.

    The first fixed ratio that holds the target in every tenth is the last one, unless `settings.to_the_end`.

    Args:
        folder: of the store; it should be empty.
        ratios: fixed recompute ratios, tried from the smallest on.
    """
    with ChunkCacheStore.open(folder) as store:
        prime(decoder, store, dataset, settings.answer_tokens, seed, progress)
        yield _run(decoder, store, dataset, settings, None, progress)
        for ratio in sorted(ratios):
            result = _run(decoder, store, dataset, settings, ratio, progress)
            yield result
            if result.holds(settings) and not settings.to_the_end:
                return


def prime(
    decoder: Decoder,
    store: ChunkCacheStore,
    dataset: Dataset,
    answer_tokens: int,
    seed: int,
    progress: Callable[[Progress], None],
) -> None:
    """Prime the documents of all questions. Nothing else is captured in a stream, so every run finds the same."""
    with Engine(decoder, store, new_variants="off") as engine:
        origins = Origins(condition_named("documents"), engine, dataset, seed, answer_tokens)
        for number, question in enumerate(dataset.questions):
            origins.before(question)
            progress(Progress(number + 1, len(dataset.questions), "Priming"))


def _run(
    decoder: Decoder,
    store: ChunkCacheStore,
    dataset: Dataset,
    settings: StreamSettings,
    ratio: float | None,
    progress: Callable[[Progress], None],
) -> StreamResult:
    size = settings.requests // TENTHS
    label = "With the quality target" if ratio is None else f"With r = {ratio:g}"
    # Nothing is captured, so every run finds the same chunk-caches.
    config = ReuseConfig.deterministic()
    answers: list[AuditedAnswer] = []
    with Engine(
        decoder,
        store,
        new_variants="off",
        audit="idle",
        config=config,
        quality_target=settings.target if ratio is None else None,
    ) as engine:
        for number, question in enumerate(dataset.questions):
            request_id = ask(engine, question, settings.answer_tokens, ratio)
            engine.settle()
            answers.append(audited(engine, question, request_id, ratio))
            progress(Progress(number + 1, len(dataset.questions), label))
            is_end_of_tenth = (number + 1) % size == 0
            if ratio is None or settings.to_the_end or not is_end_of_tenth:
                continue
            if agreement_of(answers[-size:]) < settings.target:
                break
    return StreamResult(ratio, tuple(answers))


def ask(
    engine: Engine, question: EvaluationQuestion, answer_tokens: int, ratio: float | None
) -> str:
    """Answer a question with a ratio, or with the engine's own choice for None; return the id of the request."""
    fixed = None if ratio is None else ReuseConfig.deterministic(recompute_ratio=ratio)
    answer = engine.stream(
        question.text,
        question.passages,
        sampling=SamplingParams(max_new_tokens=answer_tokens),
        config=fixed,
    )
    for _ in answer:
        pass
    return answer.stats.request_id


def audited(
    engine: Engine, question: EvaluationQuestion, request_id: str, ratio: float | None
) -> AuditedAnswer:
    """Return the audit of an answer that was asked with `ratio`; the engine has settled. Raises ConfigError without."""
    audit = engine.audit_of(request_id)
    if audit is None:
        raise ConfigError(
            f"the answer to {question.text!r} was not audited, so the stream has a gap"
        )
    used = audit.ratio if ratio is None else ratio
    assert used is not None, "a quality target notes the ratio that it chose"
    return AuditedAnswer(used, audit.recomputed, audit.tokens, audit.agreeing_net)


Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="More questions with passages than the 240 about look-alike pages: a SQuAD or XQuAD file, or another "
        "known form.",
    ),
]
ModelDtype = Annotated[
    str,
    typer.Option("--dtype", help="Number format of the model; auto is that of the checkpoint."),
]
Target = Annotated[
    float, typer.Option("--target", help="Share of the answers' tokens that should agree.")
]
Passages = Annotated[int, typer.Option("--passages", min=2, help="Chunks in each prompt.")]
AnswerTokens = Annotated[
    int, typer.Option("--answer-tokens", min=1, help="Longest answer, in tokens.")
]


def main(
    data: Data = None,
    model: options.Model = "demo",
    dtype: ModelDtype = "auto",
    target: Target = 0.98,
    requests: Annotated[
        int, typer.Option("--requests", help="Questions, a multiple of ten.")
    ] = 240,
    ratios: Annotated[
        str,
        typer.Option("--ratios", help="Fixed recompute ratios to compare with; empty for none."),
    ] = "0.1,0.15,0.2,0.25,0.3,0.4,0.5,0.6,0.8",
    passages: Passages = 5,
    answer_tokens: AnswerTokens = 16,
    to_the_end: Annotated[
        bool,
        typer.Option(
            "--to-the-end", help="Ask every question with every fixed ratio, whatever it holds."
        ),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the order of the questions.")] = 0,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Ask a stream of questions with a quality target and with fixed ratios, and compare agreement and cost."""
    options.set_threads(threads)
    options.quiet_libraries()
    settings = StreamSettings(target, requests, answer_tokens, to_the_end)
    fixed = numbers(ratios) if ratios.strip() else []
    dataset = stream_of(data, passages=passages, requests=requests, seed=seed)
    decoder = load_checked(model, dtype=dtype)
    results = []
    with tempfile.TemporaryDirectory() as folder, progress_bar("Asking", remaining=True) as show:
        for result in measure(
            decoder, dataset, Path(folder), settings, ratios=fixed, seed=seed, progress=show
        ):
            results.append(result)
            if as_json:
                print_json(_as_dict(result, settings))
    if not as_json:
        _print(results, settings)


def _as_dict(result: StreamResult, settings: StreamSettings) -> dict[str, object]:
    tenths = result.tenths(settings.requests)
    return {
        "fixed_ratio": result.fixed_ratio,
        "answers": len(result.answers),
        "holds_in_every_tenth": result.holds(settings),
        "agreement": asdict(result.agreement),
        "mean_ratio": result.mean_ratio,
        "recomputed": result.recomputed,
        "agreement_of_tenths": [agreement_of(tenth) for tenth in tenths],
        "ratio_of_tenths": [sum(answer.ratio for answer in tenth) / len(tenth) for tenth in tenths],
    }


def _print(results: Sequence[StreamResult], settings: StreamSettings) -> None:
    rows = []
    for result in results:
        agreement = result.agreement
        tenths = [agreement_of(tenth) for tenth in result.tenths(settings.requests)]
        rows.append(
            (
                "quality target" if result.fixed_ratio is None else f"r = {result.fixed_ratio:g}",
                len(result.answers),
                f"{agreement.mean:.3f} [{agreement.low:.3f}, {agreement.high:.3f}]",
                f"{min(tenths):.3f}",
                f"{result.mean_ratio:.3f}",
                f"{result.recomputed:.3f}",
            )
        )
    print_table(
        (
            f"target {settings.target:g}",
            "answers",
            "agreement",
            "lowest tenth",
            "mean r",
            "recomputed",
        ),
        rows,
        numbers=True,
    )
    controlled = results[0]
    out.print("with the quality target, mean r and agreement of each tenth of the stream:")
    for tenth in controlled.tenths(settings.requests):
        mean_ratio = sum(answer.ratio for answer in tenth) / len(tenth)
        out.print(f"  {mean_ratio:.3f}  {agreement_of(tenth):.3f}")
    if not settings.to_the_end:
        out.print(
            "A fixed ratio is given up at the first tenth that misses the target.", soft_wrap=True
        )
