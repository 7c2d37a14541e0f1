"""`cachecraft eval`: the answer quality of every method on your model and data."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cachecraft_rag.checks import MOST
from cachecraft_rag.cli import options
from cachecraft_rag.cli.options import numbers, out, print_json, progress_bar, waiting

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.formats.dataset import Dataset
    from cachecraft_rag.evaluation.quality.measuring import Record
    from cachecraft_rag.evaluation.quality.methods import Method
    from cachecraft_rag.evaluation.quality.report import Report
    from cachecraft_rag.evaluation.quality.runner import Settings

DEFAULT_OUT = Path("cachecraft-eval")

Data = Annotated[
    Path | None, typer.Option("--data", "-d", help="File of questions.", show_default="the sample handbook's own")
]
Format = Annotated[
    str | None,
    typer.Option("--format", help="squad, musique, drop, jsonl …", show_default="recognised from the first record"),
]
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        help='Comma-separated, or "all", or "ablations". Compressors run only if named: mapreduce, for which the model '
        "writes every summary, and lingua2, which needs --lingua2-model.",
        show_default="all but compressors",
    ),
]
Ratios = Annotated[str, typer.Option("--ratios", help="Recompute ratios; for compressors the share to keep.")]
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
        help="What chunks are captured behind: unrelated, neighbours, alone, similar; or stream: as in production.",
    ),
]
Warmup = Annotated[
    int, typer.Option("--warmup", min=0, help="With --origin stream: the first N questions are not measured.")
]
AnswerTokens = Annotated[int, typer.Option("--answer-tokens", min=1, help="Longest answer.")]
Corrected = Annotated[
    Path,
    typer.Option(
        "--store",
        "-s",
        help="Store whose learned correction is used, if it has one for the model; nothing else of it is. The method "
        "no_correction goes without.",
    ),
]
LinguaModel = Annotated[
    str | None, typer.Option("--lingua2-model", help="LLMLingua-2 model, name or folder; adds the method lingua2.")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of the report; a stopped evaluation resumes from it.")]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", min=-MOST - 1, max=MOST, help="Seed of questions, passages, origin prefixes and the order of methods."
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="Discard the measurements in --out.")]


def evaluate(
    context: typer.Context = None,  # type: ignore[assignment]  # typer fills it in
    data: Data = None,
    format: Format = None,
    model: options.Model = "demo",
    methods: Methods = None,
    ratios: Ratios = "0.05,0.1,0.15,0.2,0.3",
    limit: Limit = 100,
    passages: Passages = 5,
    chunk_tokens: ChunkTokens = None,
    origin: Origin = "unrelated",
    warmup: Warmup = 20,
    answer_tokens: AnswerTokens = 16,
    lingua2_model: LinguaModel = None,
    store: Corrected = options.DEFAULT_STORE,
    folder: Out = DEFAULT_OUT,
    dtype: options.Dtype = "float32",
    seed: Seed = 0,
    threads: options.Threads = None,
    restart: Restart = False,
    as_json: options.Json = False,
) -> None:
    """Compare the answers of every method with full prefill's, question by question.

    Writes report.md with figures to --out. After Ctrl-C, the same command resumes.
    """
    if context is not None and context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    options.set_threads(threads)
    from cachecraft_rag.evaluation.plotting import pyplot
    from cachecraft_rag.evaluation.quality.figures import EXTRA
    from cachecraft_rag.evaluation.quality.measuring import trials_of
    from cachecraft_rag.evaluation.quality.report import summarise
    from cachecraft_rag.evaluation.quality.runner import Settings

    require_packages()
    pyplot(EXTRA)
    trials = trials_of(_methods(methods, lingua2=lingua2_model is not None), numbers(ratios))
    settings = Settings(trials, origin=origin, warmup=warmup, answer_tokens=answer_tokens, seed=seed)
    dataset = dataset_of(data, format, passages=passages, limit=limit, seed=seed, chunk_tokens=chunk_tokens)
    settings.measured(dataset)
    described, records = _measure(
        settings, dataset, folder, store=store, model=model, dtype=dtype, restart=restart, lingua2_model=lingua2_model
    )
    report = summarise(records)
    page = _write(report, described, folder)
    if as_json:
        print_json(report.as_dict())
    else:
        _print(report, page)


def require_packages() -> None:
    """Raise ConfigError if a package of the extra `eval` is missing: before the work, not after it."""
    from cachecraft_rag.evaluation.quality.intervals import mean_interval
    from cachecraft_rag.evaluation.quality.metrics import rouge_l

    rouge_l("one", "two")
    mean_interval([1.0, 2.0], resamples=2)


def _refuse_options(context: typer.Context) -> None:
    """Options before the subcommand would be silently ignored. Raises ConfigError."""
    from cachecraft_rag.errors import ConfigError

    given = [
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise ConfigError(f"write options behind the subcommand: cachecraft eval {context.invoked_subcommand} …")


def _methods(names: str | None, *, lingua2: bool) -> list[Method]:
    """The methods named; without names all except compressors, plus lingua2 if its model is given."""
    from cachecraft_rag.evaluation.quality.methods import METHODS, methods_named

    if names is not None and names != "all":
        return methods_named([*(name.strip() for name in names.split(",")), *(["lingua2"] if lingua2 else [])])
    wanted = {None, "mapreduce" if names == "all" else None, "lingua2" if lingua2 else None}
    return [method for method in METHODS.values() if method.compression in wanted]


def dataset_of(
    path: Path | None, format: str | None, *, passages: int, limit: int, seed: int, chunk_tokens: int | None
) -> Dataset:
    """The questions of a file, or those of the sample handbook if there is no file."""
    from cachecraft_rag.errors import ConfigError
    from cachecraft_rag.evaluation.formats.dataset import handbook_dataset, load_dataset

    if path is not None:
        return load_dataset(path, format=format, passages=passages, limit=limit, seed=seed, chunk_tokens=chunk_tokens)
    if format is not None or chunk_tokens is not None:
        raise ConfigError("--format and --chunk-tokens apply to a file of questions: name it with --data")
    return handbook_dataset(passages=passages, limit=limit, seed=seed)


def _measure(
    settings: Settings,
    dataset: Dataset,
    folder: Path,
    *,
    store: Path,
    model: str,
    dtype: str,
    restart: bool,
    lingua2_model: str | None,
) -> tuple[dict[str, Any], list[Record]]:
    """The settings as written to the records, and all records."""
    from cachecraft_rag.evaluation.quality import runner
    from cachecraft_rag.evaluation.quality.records import RecordLog

    options.quiet_libraries()
    with ExitStack() as opened:
        with waiting("Loading the model"):
            engine = opened.enter_context(runner.open_engine(model, folder, dtype=dtype))
            engine.use_correction(store)
            described = settings.describe(engine, dataset)
            if lingua2_model is not None:
                described["lingua2_model"] = lingua2_model
            log = opened.enter_context(RecordLog(folder, described, restart=restart))
            compressors = runner.compressors_of(engine, settings.trials, lingua2_model=lingua2_model)
        with progress_bar("Measuring", remaining=True) as show:
            records = runner.evaluate(engine, dataset, settings, log=log, compressors=compressors, progress=show)
    return described, records


def _write(report: Report, described: dict[str, Any], folder: Path) -> Path:
    """Write the figures and the page that shows them; returns the page's path."""
    from cachecraft_rag.errors import ConfigError
    from cachecraft_rag.evaluation.quality.figures import draw
    from cachecraft_rag.evaluation.quality.report import markdown

    page = folder / "report.md"
    figures = draw(report, folder)
    try:
        page.write_text(markdown(report, described, figures), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{page} cannot be written: {error}") from error
    return page


def _print(report: Report, page: Path) -> None:
    from cachecraft_rag.evaluation.quality.report import HEADINGS, short_rows

    table = Table(box=SIMPLE_HEAD)
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if place == 0 else "right", no_wrap=place == 0)
    for row in short_rows(report):
        table.add_row(*row)
    out.print(table)
    out.print(
        f"means over {report.questions} questions; the report with intervals and figures: {page}",
        highlight=False,
    )
