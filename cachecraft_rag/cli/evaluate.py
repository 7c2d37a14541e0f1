"""`cachecraft eval`: what reuse costs in answers, on your model and questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cachecraft_rag.checks import MOST
from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import numbers, out, print_json, progress_bar, takes, waiting
from cachecraft_rag.errors import ConfigError

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.dataset import Dataset
    from cachecraft_rag.evaluation.formats import Source
    from cachecraft_rag.evaluation.measuring import Method, Record
    from cachecraft_rag.evaluation.origins import OriginCondition
    from cachecraft_rag.evaluation.report import Report
    from cachecraft_rag.store import ChunkCacheStore

DEFAULT_OUT = Path("cachecraft-eval")

Data = Annotated[
    Path | None, typer.Option("--data", "-d", help="File of questions.", show_default="the sample handbook's own")
]
Format = Annotated[
    str | None,
    typer.Option("--format", help="squad or jsonl", show_default="recognised from the first record"),
]
Methods = Annotated[
    str | None,
    typer.Option("--methods", help="Comma-separated.", show_default="full_recompute,prefix_cache,full_cache,default"),
]
Ratios = Annotated[str, typer.Option("--ratios", help="Recompute ratios.")]
Limit = Annotated[int, typer.Option("--limit", min=1, help="Questions, including those of the warm-up.")]
Passages = Annotated[int, typer.Option("--passages", min=1, help="Chunks in each prompt.")]
ChunkTokens = Annotated[
    int | None,
    typer.Option(
        "--chunk-tokens",
        min=16,
        max=1 << 20,
        help="Approximate length limit of a chunk; needs --data.",
        show_default="the format's",
    ),
]
Origin = Annotated[
    str,
    typer.Option(
        "--origin",
        help="What chunks are captured behind: unrelated, neighbours, alone; or stream: as in production.",
    ),
]
Warmup = Annotated[
    int, typer.Option("--warmup", min=0, help="With --origin stream: the first N questions are not measured.")
]
AnswerTokens = Annotated[int, typer.Option("--answer-tokens", min=1, help="Longest answer.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of the report; a stopped evaluation resumes from it.")]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", min=-MOST - 1, max=MOST, help="Seed of questions, passages, origin prefixes and the order of methods."
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="Discard the measurements in --out.")]


@dataclass(frozen=True)
class Questions:
    """Options: the questions to ask, and their passages."""

    data: Data = None
    format: Format = None
    limit: Limit = 100
    passages: Passages = 5
    chunk_tokens: ChunkTokens = None
    answer_tokens: AnswerTokens = 16
    seed: Seed = 0

    def load(self, read: Callable[[Path, str | None], Source] | None = None) -> Dataset:
        """The questions of a file, or those of the sample handbook if there is no file.

        Args:
            read: reads a file in the format named; None = the formats of `evaluation.formats`.
        """
        from cachecraft_rag.evaluation.dataset import handbook_dataset, load_dataset
        from cachecraft_rag.evaluation.formats import read_source

        drawn: dict[str, Any] = {"passages": self.passages, "limit": self.limit, "seed": self.seed}
        if self.data is not None:
            chunk_tokens = self.chunk_tokens
            return load_dataset(
                self.data, format=self.format, chunk_tokens=chunk_tokens, read=read or read_source, **drawn
            )
        if self.format is not None or self.chunk_tokens is not None:
            raise ConfigError("--format and --chunk-tokens apply to a file of questions: name it with --data")
        return handbook_dataset(**drawn)


@dataclass(frozen=True)
class Measuring:
    """Options: the model and store to measure with, at which ratios, and where results go."""

    model: options.Model = "demo"
    ratios: Ratios = "0.05,0.1,0.15,0.2,0.3"
    origin: Origin = "unrelated"
    warmup: Warmup = 20
    folder: Out = DEFAULT_OUT
    dtype: options.Dtype = "float32"
    restart: Restart = False

    def run(
        self,
        dataset: Dataset,
        questions: Questions,
        methods: Sequence[Method],
        *,
        origin: OriginCondition,
        kind: type[ChunkCacheStore] | None = None,
    ) -> tuple[dict[str, Any], list[Record]]:
        """Measure what the folder's records lack; returns the settings as written there, and all records."""
        from cachecraft_rag.evaluation import runner
        from cachecraft_rag.evaluation.measuring import trials_of
        from cachecraft_rag.evaluation.records import RecordLog

        trials = trials_of(methods, numbers(self.ratios))
        settings = runner.Settings(trials, origin, self.warmup, questions.answer_tokens, questions.seed)
        settings.measured(dataset)
        options.quiet_libraries()
        with ExitStack() as opened:
            with waiting("Loading the model"):
                engine = opened.enter_context(runner.open_engine(self.model, self.folder, dtype=self.dtype, kind=kind))
                described = settings.describe(engine, dataset)
                log = opened.enter_context(RecordLog(self.folder, described, restart=self.restart))
            with progress_bar("Measuring", remaining=True) as show:
                return described, runner.evaluate(engine, dataset, settings, log=log, progress=show)


@takes(questions=Questions, measuring=Measuring)
def evaluate(
    methods: Methods = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
    *,
    questions: Questions,
    measuring: Measuring,
) -> None:
    """Compare the answers with reuse to full prefill's, question by question.

    Writes report.md to --out. After Ctrl-C, the same command resumes.
    """
    options.set_threads(threads)
    require_packages()
    from cachecraft_rag.evaluation.measuring import METHODS, methods_named
    from cachecraft_rag.evaluation.origins import condition_named
    from cachecraft_rag.evaluation.report import summarise

    chosen = methods_named(list(METHODS) if methods is None else [name.strip() for name in methods.split(",")])
    origin = condition_named(measuring.origin)
    described, records = measuring.run(questions.load(), questions, chosen, origin=origin)
    show_report(summarise(records, order=list(METHODS)), described, measuring.folder, as_json=as_json)


def require_packages() -> None:
    """Raise ConfigError if the package of the extra `eval` is missing: before the work, not after it."""
    from cachecraft_rag.evaluation.metrics import rouge_l

    rouge_l("one", "two")


def show_report(
    report: Report, described: dict[str, Any], folder: Path, *, figures: Sequence[str] = (), as_json: bool
) -> None:
    """Write the page with the report into the folder, and print the report."""
    from cachecraft_rag.evaluation.report import markdown

    page = folder / "report.md"
    try:
        page.write_text(markdown(report, described, figures), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{page} cannot be written: {error}") from error
    if as_json:
        print_json(report.as_dict())
        return
    table = Table(box=SIMPLE_HEAD)
    for place, heading in enumerate(report.headings):
        table.add_column(heading, justify="left" if place == 0 else "right", no_wrap=place == 0)
    for row in report.rows(intervals=False):
        table.add_row(*row)
    out.print(table)
    out.print(f"means over {report.questions} questions; the report with intervals: {page}", highlight=False)
