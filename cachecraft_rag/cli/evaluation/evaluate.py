"""`cachecraft eval`: what reuse costs in answers, on your model and questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cachecraft_rag.checks import MOST, check_whole
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import (
    numbers,
    print_json,
    print_table,
    progress_bar,
    takes,
    waiting,
)
from cachecraft_rag.errors import ConfigError

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.dataset import Dataset
    from cachecraft_rag.evaluation.formats import QuestionFile
    from cachecraft_rag.evaluation.measuring import Method, Record
    from cachecraft_rag.evaluation.origins import OriginCondition
    from cachecraft_rag.evaluation.report import Report
    from cachecraft_rag.store import ChunkCacheStore

DEFAULT_LIMIT = 100
AUTO = "auto"  # in --ratios: no ratio, the engine decides


@dataclass(frozen=True)
class Questions:
    """Options: the questions to ask, and their passages.

    data           file of questions; or lookalikes, a test set of similar pages that comes with the package, or half of
                   it: lookalikes:tune, lookalikes:confirm. Without it, the sample handbook's questions
    format         format of the file, squad or jsonl; without it recognised from the first record
    limit          questions, including those of the warm-up; by default 100, and all of lookalikes
    passages       chunks in each prompt
    chunk_tokens   approximate length limit of a chunk, at least 16; needs --data
    answer_tokens  longest answer
    seed           seed of questions, passages, origin prefixes and the order of methods
    """

    data: Path | None = None
    format: str | None = None
    limit: int | None = None
    passages: int = 5
    chunk_tokens: int | None = None
    answer_tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers that nothing else checks; raises ConfigError."""
        check_whole("--chunk-tokens", self.chunk_tokens, least=16, most=1 << 20, optional=True)
        check_whole("--answer-tokens", self.answer_tokens, least=1)
        check_whole("--seed", self.seed, least=-MOST - 1)

    def load(self, read: Callable[[Path, str | None], QuestionFile] | None = None) -> Dataset:
        """Return the questions of a file or of a named test set, or those of the sample handbook if neither is given.

        `read` reads a file in the format named; None = the formats of `evaluation.formats`.
        """
        from cachecraft_rag.evaluation.dataset import handbook_dataset, load_dataset
        from cachecraft_rag.evaluation.formats import read_source
        from cachecraft_rag.evaluation.lookalikes import lookalikes_dataset, parse_name

        is_lookalikes, half = parse_name(str(self.data))
        if is_lookalikes:
            self._refuse_file_options()
            return lookalikes_dataset(
                half=half, passages=self.passages, limit=self.limit, seed=self.seed
            )
        limit = DEFAULT_LIMIT if self.limit is None else self.limit
        if self.data is not None:
            return load_dataset(
                self.data,
                format=self.format,
                passages=self.passages,
                limit=limit,
                seed=self.seed,
                chunk_tokens=self.chunk_tokens,
                read=read or read_source,
            )
        self._refuse_file_options()
        return handbook_dataset(passages=self.passages, limit=limit, seed=self.seed)

    def _refuse_file_options(self) -> None:
        if self.format is not None or self.chunk_tokens is not None:
            raise ConfigError(
                "--format and --chunk-tokens apply to a file of questions: name it with --data"
            )


@dataclass(frozen=True)
class Measuring:
    """Options: the model and store to measure with, at which ratios, and where results go.

    ratios   recompute ratios, comma-separated; auto: the engine decides, as ask does without a ratio.
             The report calls that default, and a ratio default@0.15
    origin   how chunks were captured before a question reuses them. documents: primed, as index --prime does it;
             stream: by the questions before; neighbours: after the chunks before them in their document; alone: after
             a fixed passage; unrelated: after chunks of other documents, the hardest case
    warmup   with --origin stream: the first N questions are not measured
    out      folder of the report; a stopped evaluation resumes from it
    restart  discard the measurements in --out
    """

    model: str = "demo"
    ratios: str = "auto,0.05,0.1,0.15,0.3"
    origin: str = "documents"
    warmup: int = 20
    out: Path = Path("cachecraft-eval")
    dtype: str = "float32"
    device: str = "auto"
    restart: bool = False

    def run(
        self,
        dataset: Dataset,
        questions: Questions,
        methods: Sequence[Method],
        *,
        origin: OriginCondition,
        kind: type[ChunkCacheStore] | None = None,
    ) -> tuple[dict[str, object], list[Record]]:
        """Measure what the folder's records lack, appending each at once; return the settings and all records.

        The model is loaded for this, with a store in a hidden folder inside `out` that is removed afterwards. Progress
        goes to stderr. ConfigError if the folder holds measurements with other settings and this is no restart, or if
        the warm-up leaves no question.

        Args:
            dataset: questions to ask; of `questions` only `answer_tokens` and `seed` are used.
            methods: methods to measure, each at each recompute ratio if it takes one.
            origin: how chunks are captured before a question reuses them.
            kind: class of the store, for experiments that change its look-ups.
        """
        from cachecraft_rag.evaluation import runner
        from cachecraft_rag.evaluation.measuring import trials_of
        from cachecraft_rag.evaluation.records import RecordLog

        trials = trials_of(methods, recompute_ratios(self.ratios))
        settings = runner.EvaluationSettings(
            trials, origin, self.warmup, questions.answer_tokens, questions.seed
        )
        settings.measured(dataset)
        options.quiet_libraries()
        with ExitStack() as opened:
            with waiting("Loading the model"):
                engine = opened.enter_context(
                    runner.open_engine(
                        self.model, self.out, dtype=self.dtype, device=self.device, kind=kind
                    )
                )
                described = settings.describe(engine, dataset)
                log = opened.enter_context(RecordLog(self.out, described, restart=self.restart))
            with progress_bar("Measuring", remaining=True) as show:
                return described, runner.evaluate(engine, dataset, settings, log=log, progress=show)


def recompute_ratios(text: str) -> list[float | None]:
    """Return the recompute ratios of a comma-separated list, in order, their range unchecked; None for "auto".

    ConfigError for a part that is no finite number.

    >>> recompute_ratios("auto, 0.15")
    [None, 0.15]
    """
    ratios: list[float | None] = []
    for part in text.split(","):
        ratios += [None] if part.strip() == AUTO else numbers(part)
    return ratios


@dataclass(frozen=True)
class MethodOptions:
    """Options: the methods to compare.

    methods  comma-separated; all without it: full_recompute, prefix_cache, full_cache, default
    """

    methods: str | None = None
    threads: options.Threads = None


@takes(chosen=MethodOptions, questions=Questions, measuring=Measuring)
def evaluate(
    as_json: options.Json = False,
    *,
    chosen: MethodOptions,
    questions: Questions,
    measuring: Measuring,
) -> None:
    """Compare the answers with reuse to full prefill's, question by question.

    With gold answers it also counts the right answers that reuse loses and wins. "Net of near ties" leaves out lost
    answers that depart from full prefill's where its two likeliest tokens were almost equally likely.

    Writes report.md to --out. After Ctrl-C, the same command resumes. Poor quality does not change the exit code. Exit
    code 2 if the questions, an option, the model or --out cannot be used, or the extra `eval` is not installed.
    """
    # Raises the errors of `Questions.load`, `Measuring.run` and `show_report`; see `app.main` for exit codes.
    options.set_threads(chosen.threads)
    require_packages()
    from cachecraft_rag.evaluation.measuring import METHODS, methods_named
    from cachecraft_rag.evaluation.origins import condition_named
    from cachecraft_rag.evaluation.report import summarise

    names = list(METHODS)
    if chosen.methods is not None:
        names = [name.strip() for name in chosen.methods.split(",")]
    methods = methods_named(names)
    origin = condition_named(measuring.origin)
    described, records = measuring.run(questions.load(), questions, methods, origin=origin)
    show_report(summarise(records, order=list(METHODS)), described, measuring.out, as_json=as_json)


def require_packages() -> None:
    """Raise ConfigError if rouge-score, of the extra `eval`, is missing, before the first measurement needs it."""
    from cachecraft_rag.evaluation.metrics import rouge_l

    rouge_l("one", "two")


def show_report(
    report: Report,
    described: dict[str, object],
    folder: Path,
    *,
    figures: Sequence[str] = (),
    as_json: bool,
) -> None:
    """Write the report to `report.md` in the folder, as Markdown, and print a shorter one to stdout.

    `described` heads the page, see `EvaluationSettings.describe`; `figures` are file names of images in the folder.
    `as_json` prints the whole report as one line instead of tables.
    """
    from cachecraft_rag.evaluation.report import full_answers, markdown

    page = folder / "report.md"
    try:
        page.write_text(markdown(report, described, figures), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{page} cannot be written: {error.strerror or error}") from error
    if as_json:
        print_json(report.as_dict())
        return
    answer_rows = report.answer_rows(intervals=True)
    if answer_rows:
        print_table(report.answer_headings, answer_rows, numbers=True)
        out.print()
    print_table(report.headings, report.rows(intervals=False), numbers=True)
    out.print(f"means over {report.questions} questions; the report with intervals: {page}")
    out.print(full_answers(report))
