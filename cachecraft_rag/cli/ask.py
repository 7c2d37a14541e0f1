"""`cachecraft index` and `ask`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachecraft_rag.checks import check_names
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import err, out
from cachecraft_rag.cli.first_sentence import first_sentence
from cachecraft_rag.cli.options import (
    ANSWER_KEYS,
    ENGINE_KEYS,
    counted,
    megabytes,
    print_json,
    takes,
    waiting,
    warn,
)
from cachecraft_rag.engine.settings import Settings
from cachecraft_rag.errors import ConfigError, IndexStoreError, ModelNotFoundError
from cachecraft_rag.observability.stats import Answer, ChunkStats
from cachecraft_rag.planning.reasons import Reason
from cachecraft_rag.retrievers.folders import require_readable
from cachecraft_rag.retrievers.reading.documents import SUFFIXES

if TYPE_CHECKING:
    from cachecraft_rag.observability.stats import RequestStats
    from cachecraft_rag.rag import AnswerStream, AskOptions, CacheCraft, Comparison
    from cachecraft_rag.retrievers.index.filters import Where
    from cachecraft_rag.retrievers.indexer import IndexReport
    from cachecraft_rag.serving.priming import PrimingEstimate
    from cachecraft_rag.store import ChunkCacheStore

BRIEF = typer.Option(
    "--brief/--no-brief",
    show_default="--brief for the demo model",
    help="End answers after their first sentence: small models go on to invent.",
)


def require_index(store: Path) -> None:
    """Raise IndexStoreError if the store has no folder of a retrieval index; an empty index passes.

    To be called before a model is loaded, which takes long, or a folder is made.
    """
    from cachecraft_rag.retrievers.retriever import INDEX_FOLDER

    # pathlib raises for paths it cannot reach instead of returning False
    if not os.path.isdir(store / INDEX_FOLDER):
        raise IndexStoreError(
            f"{store} holds no documents yet; add some with `cachecraft index DIR --store {store}`, or name another "
            "folder with --store"
        )


def require_match(store: Path, where: Where | None) -> None:
    """Raise ConfigError if the filter leaves no chunk: the model would answer without a source. None passes."""
    if where is None:
        return
    from cachecraft_rag.retrievers.index.faiss_store import FaissStore
    from cachecraft_rag.retrievers.retriever import INDEX_FOLDER

    with FaissStore.open(store / INDEX_FOLDER) as index:
        if not index.places(where=where):
            raise ConfigError(
                "no chunk matches --where; `cachecraft documents ls` shows the documents that there are"
            )


def load(settings: Settings, *, server: str | None = None, **chosen: object) -> CacheCraft:
    """Open a `CacheCraft` by the settings, with a spinner on stderr meanwhile; the caller closes it.

    From then on traces are sent if the environment names a collector (`trace_requests`). Without a server, progress
    bars and some warnings of other libraries are switched off for this process (`quiet_libraries`).

    Args:
        server: address of a server that `cachecraft serve` started; its keys are those of `options.server_keys`. Of the
            settings only `store`, `embeddings` and a given `system` are then used; the others are checked.
        chosen: options of `EngineConfig`; they override the settings. Over a server only `system` is possible.
    """
    if server is not None:
        check_names(chosen, ("system",), what="option over a server")
    config = settings.engine_config(**chosen)
    trace_requests()
    store = settings["store"]
    model = settings["model"]
    doing = f"Connecting to {server}" if server is not None else f"Loading {model}"
    with waiting(doing):
        from cachecraft_rag.rag import CacheCraft

        options_of_index = {}
        if settings["embeddings"] is not None:
            options_of_index["embeddings"] = settings["embeddings"]
        if server is not None:
            system = (settings.given() | chosen).get("system")
            return CacheCraft.connect(
                server, store=store, system=system, **options.server_keys(), **options_of_index
            )
        options.quiet_libraries()
        return CacheCraft.from_pretrained(model, store=store, config=config, **options_of_index)


def trace_requests() -> None:
    """Send traces from now on if the environment names a collector (`OTEL_EXPORTER_OTLP_ENDPOINT`).

    See `configure_tracing`; if that fails, a warning on stderr: the variables may be meant for other programs.
    """
    from cachecraft_rag.observability.tracing import configure_tracing

    try:
        configure_tracing()
    except ConfigError as error:
        warn(f"no traces are sent: {error}")


@dataclass(frozen=True)
class IndexOptions:
    """Options of `index`.

    prime         also compute all chunk-caches now, so that the first question is fast too
    alone         with --prime, each chunk after a fixed passage instead of its neighbours, which then do not shape it
    follow_links  also index files outside the folder that links in it point to
    """

    prime: bool = False
    alone: bool = False
    follow_links: bool = False

    def __post_init__(self) -> None:
        """Check what is asked for; raises ConfigError."""
        if self.alone and not self.prime:
            raise ConfigError("--alone has no effect without --prime: add it, or leave --alone out")


@takes(*ENGINE_KEYS, "embeddings", chosen=IndexOptions)
def index(
    folder: Annotated[
        Path, typer.Argument(help="Folder or file: text, Markdown, HTML, PDF, Word, CSV, JSON.")
    ],
    as_json: options.Json = False,
    *,
    settings: Settings,
    chosen: IndexOptions,
) -> None:
    """Index documents. Embeds only those that changed since the last run, and removes those that no longer exist.

    Files that cannot be read are left out, with a warning. Exit code 2 if there is no folder or readable kind of file
    at the path, or if a setting, a model or the store cannot be used; 0 for an empty folder, whose documents leave.
    """
    # Raises ConfigError, DocumentError, ModelNotFoundError, IndexStoreError, StoreError, UnsupportedModelError;
    # see `app.main` for exit codes.
    settings.engine_config()
    require_readable(folder)  # before the models are loaded and a store is made
    report = index_into(settings, folder, follow_links=chosen.follow_links)
    _evict_removed(Path(settings["store"]))
    primed = Primed()
    if chosen.prime:
        with load(settings) as rag:
            primed = prime_all(rag, alone=chosen.alone)
    if as_json:
        print_json(asdict(report) | asdict(primed))
    else:
        print_index_report(report, primed)


def _evict_removed(store: Path) -> None:
    """Delete the chunk-caches of chunks that left the index, now or in an earlier run that could not delete them."""
    from cachecraft_rag.retrievers.index.faiss_store import FaissStore
    from cachecraft_rag.retrievers.index.removal import evict_removed
    from cachecraft_rag.retrievers.retriever import INDEX_FOLDER

    with FaissStore.open(store / INDEX_FOLDER) as index:
        if index.removed_chunks():
            with opened_caches(store) as caches:
                evict_removed(index, caches)


def index_into(settings: Settings, folder: Path, *, follow_links: bool) -> IndexReport:
    """Index a folder or file with the embedding model; of the answering model only the tokenizer is loaded, if found.

    The index is made if it is missing, and closed at the end. Progress goes to stderr, and other libraries are quiet
    from then on (`quiet_libraries`). The first use of the model "demo" also converts or downloads its weights.

    Chunk-caches of removed chunks (`removed_chunk_ids` of the report) stay: the caller removes them.
    """
    with waiting("Loading the embedding model"):
        from cachecraft_rag.model.checkpoint import chunk_bound_of
        from cachecraft_rag.retrievers.embeddings import BUNDLED_EMBEDDER, Embedder
        from cachecraft_rag.retrievers.indexer import index_folder
        from cachecraft_rag.retrievers.retriever import open_index

        options.quiet_libraries()
        embedder = Embedder(settings["embeddings"] or BUNDLED_EMBEDDER)
        bound = None
        with suppress(ModelNotFoundError):  # indexing works without the model
            bound = chunk_bound_of(settings["model"])
    with (
        options.progress_bar("Indexing") as show,
        open_index(settings["store"], embedder) as opened,
    ):
        return index_folder(
            folder, opened, embedder, progress=show, model=bound, follow_links=follow_links
        )


@dataclass(frozen=True)
class Primed:
    """The result of --prime.

    captured    number of chunk-caches that were computed; None without --prime
    estimate    the work as estimated before; None without --prime
    not_primed  a sentence about each document with chunks that are too long to prime
    """

    captured: int | None = None
    estimate: PrimingEstimate | None = None
    not_primed: tuple[str, ...] = ()


def prime_all(rag: CacheCraft, *, alone: bool = False) -> Primed:
    """Print the estimate of priming, compute all missing chunk-caches, and return what was done.

    Estimate and progress go to stderr. For `alone` see `CacheCraft.prime`.
    """
    estimate = rag.estimate_priming(alone=alone)
    skipped: list[str] = []
    print_estimate(estimate, rag.engine.disk_space().codec)
    with options.progress_bar("Computing chunk-caches", remaining=True) as show:
        captured = rag.prime(alone=alone, progress=show, skipped=skipped.append)
    return Primed(captured, estimate, tuple(skipped))


def print_estimate(estimate: PrimingEstimate, codec: str) -> None:
    """Print to stderr what priming takes with this codec, and a warning if store or disk is too small for it."""
    err.print(
        f"to compute: {counted(estimate.captures, 'chunk-cache')}, {counted(estimate.tokens, 'token')}, "
        f"{megabytes(estimate.nbytes)} on disk ({codec}); the store takes {megabytes(estimate.disk_used)} of "
        f"{megabytes(estimate.disk_budget)}, {megabytes(estimate.disk_free)} of the disk are free",
        soft_wrap=True,
    )
    if not estimate.fits:
        warn(
            "That is more than fits: the least useful chunk-caches will be removed. Raise --disk-bytes, or choose a "
            "smaller --codec (docs/guides/choosing.md)."
        )


@contextmanager
def opened_caches(store: Path) -> Iterator[ChunkCacheStore | None]:
    """Open the chunk-caches of a store folder for the block, which gets None if it has none yet."""
    from cachecraft_rag.store import ChunkCacheStore
    from cachecraft_rag.store.config import CACHE_FOLDER

    if not os.path.isdir(store / CACHE_FOLDER):
        yield None
        return
    with ChunkCacheStore.open(store / CACHE_FOLDER) as caches:
        yield caches


def print_index_report(report: IndexReport, primed: Primed) -> None:
    """Print the report on stdout, and warnings on stderr: for what was left out and chunks too long to prime."""
    out.print(
        f"{counted(len(report.added), 'document')} added, {len(report.updated)} updated, "
        f"{len(report.removed)} removed, {len(report.unchanged)} unchanged; "
        f"{counted(report.chunks_embedded, 'chunk')} embedded in {report.seconds:.1f} s"
    )
    if primed.captured is not None:
        out.print(
            f"{counted(primed.captured, 'chunk-cache')} computed (the instruction has one too)"
        )
    for problem in report.problems:
        is_incomplete = problem.kind == "incomplete"  # its document is in the index
        warn(problem.reason if is_incomplete else f"left out {problem.reason}")
    if not any((report.added, report.updated, report.removed, report.unchanged)):
        warn(f"nothing was found to index; files end in {', '.join(SUFFIXES)}")
    for sentence in primed.not_primed:
        warn(sentence)


@dataclass(frozen=True)
class AskingOptions:
    """Options of questions.

    where   only chunks with this metadata: source=docs/kettle.md, or source=docs/* ; may be repeated
    server  ask the model of a server that `cachecraft serve` started, such as http://127.0.0.1:8000. Options about the
            model and its chunk-caches are then the server's own. Its keys are read from CACHECRAFT_API_KEY and
            CACHECRAFT_ADMIN_KEY, which removing documents needs
    """

    where: list[str] | None = None
    brief: Annotated[bool | None, BRIEF] = None
    server: str | None = None

    def is_brief(self, settings: Settings) -> bool:
        """Return True if answers end after their first sentence: by default for the demo model in this process."""
        if self.brief is not None:
            return self.brief
        return self.server is None and settings["model"] == "demo"

    @contextmanager
    def open(self, settings: Settings) -> Iterator[tuple[CacheCraft, AskOptions]]:
        """Open a `CacheCraft` by `load` for the block, which gets it and the options of each question.

        `brief` is not among them, see `is_brief`. A wrong setting, a missing index and a `--where` without a match are
        found before a model is loaded.
        """
        config = settings.engine_config()
        asking: AskOptions = {"top_k": settings["top_k"], "sampling": settings.sampling()}
        asking["where"] = options.where_of(self.where)
        if self.server is not None:  # an engine in this process has it
            asking["config"] = config.reuse
        store = Path(settings["store"])
        require_index(store)
        require_match(store, asking["where"])
        with load(settings, server=self.server) as rag:
            yield rag, asking


@takes(*ENGINE_KEYS, *ANSWER_KEYS, "method.early_termination", "reuse.reuse", chosen=AskingOptions)
def ask(
    question: Annotated[str, typer.Argument(help="Your question.")],
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Answer with full prefill, too, and compare. Nothing is captured.",
        ),
    ] = False,
    as_json: options.Json = False,
    *,
    settings: Settings,
    chosen: AskingOptions,
) -> None:
    """Answer one question over the indexed documents.

    Exit code 2 if the question is empty, no document is indexed, or a setting, the model or the server cannot be used.
    """
    # Raises ConfigError, ContextLengthError, and the errors of `AskingOptions.open` and `print_stream`;
    # see `app.main` for exit codes.
    if not question.strip():
        raise ConfigError(
            'the question is empty; write one, for example cachecraft ask "How often?"'
        )
    with chosen.open(settings) as (rag, asking):
        brief = chosen.is_brief(settings)
        if compare:
            print_comparison(rag.compare(question, **asking), brief=brief, as_json=as_json)
            return
        stream = rag.stream(question, **asking)
        if as_json:
            print_json(whole_answer(stream, brief=brief).as_dict())
        else:
            print_stream(stream, brief=brief)
            print_sources(stream)
            print_stats(stream.stats)
            print_calibration(rag)


def print_comparison(comparison: Comparison, *, brief: bool, as_json: bool) -> None:
    """Print both answers, the share of words that agree, both times to the first token, and the statistics of reuse.

    With `brief` only the first sentence of each answer; `as_json` prints the whole comparison as one line instead. If
    an answer is empty, the times are not compared.
    """
    if as_json:
        print_json(comparison.as_dict())
        return
    for heading, answer in (
        ("with reuse:", comparison.reused),
        ("with full prefill:", comparison.full),
    ):
        sentence = first_sentence(answer.text) if brief else None
        out.print(heading, style="bold")
        out.print((sentence or answer.text).strip(), soft_wrap=True)
    agreement = (
        "the same words" if comparison.is_same else f"{comparison.agreement:.0%} of the words agree"
    )
    reused_s = comparison.reused.stats.ttft_s
    full_s = comparison.full.stats.ttft_s
    if math.isnan(comparison.speedup):
        out.print(f"{agreement}; an answer is empty, so no times are compared", style="dim")
    else:
        out.print(
            f"{agreement}; first token after {reused_s:.2f} s with reuse, {full_s:.2f} s with full prefill: "
            f"{comparison.speedup:.1f} times as fast with reuse",
            style="dim",
        )
    print_stats(comparison.reused.stats)


def print_stream(stream: AnswerStream, *, brief: bool) -> str:
    """Print the answer to stdout as it is generated, with a line end after it, and return it.

    With `brief`, the stream is closed after its first sentence, if there is one, and that is what is printed and
    returned.
    """
    printed = 0
    for piece in stream:
        sentence = first_sentence(stream.text) if brief else None
        if sentence is not None:
            out.print(sentence[printed:], end="", soft_wrap=True)
            stream.close()
            out.print()
            return sentence
        out.print(piece, end="", soft_wrap=True)
        printed += len(piece)
    out.print()
    return stream.text


def whole_answer(stream: AnswerStream, *, brief: bool) -> Answer:
    """Return the answer without printing it, with its sources and statistics.

    With `brief`, the stream is closed after its first sentence, if there is one, and that is the text.
    """
    if brief:
        for _ in stream:
            sentence = first_sentence(stream.text)
            if sentence is not None:
                stream.close()
                return Answer(sentence, stream.sources, stream.stats)
    return stream.answer()


def outcome_of(chunk: ChunkStats) -> str:
    """Return how a chunk-cache was used, such as "exact" or "exact in part", and after a colon any reason for it."""
    if chunk.reason_code is Reason.COMPUTED_FASTER and chunk.outcome in ("exact", "reused"):
        return (
            f"{chunk.outcome} in part: computing the rest was expected to be faster than loading it"
        )
    return chunk.outcome if not chunk.reason else f"{chunk.outcome}: {chunk.reason}"


def print_sources(stream: AnswerStream) -> None:
    """Print a table of an ended answer's chunks: the source of each, and how its chunk-cache was used."""
    reports = {chunk.chunk_id: chunk for chunk in stream.stats.chunks}
    rows = []
    for place, source in enumerate(stream.sources, start=1):
        chunk = reports[source.chunk_id]
        rows.append(
            (
                place,
                source.metadata.get("source") or "",
                source.metadata.get("heading") or "",
                "" if source.score is None else f"{source.score:.2f}",
                chunk.tokens,
                outcome_of(chunk),
                chunk.recomputed,
                chunk.computed,
                chunk.tier or "",
            )
        )
    headings = (
        "#",
        "source",
        "heading",
        "score",
        "tokens",
        "chunk-cache",
        "recomputed",
        "computed",
        "tier",
    )
    options.print_table(headings, rows)


def print_calibration(rag: CacheCraft) -> None:
    """Print one line to stdout if a calibrated α decides how much is recomputed; else print nothing."""
    calibration = rag.engine.calibration_for(rag.engine.config)
    if rag.engine.config.reuse and calibration is not None:
        out.print(str(calibration), style="dim")


def print_stats(stats: RequestStats) -> None:
    """Print a request's times and tokens in a line, and a warning to stderr if the remote did not answer."""
    spared = f" ({stats.tokens_spared} spared out of focus)" if stats.tokens_spared else ""
    out.print(
        f"first token after {stats.ttft_s:.2f} s (plan {stats.plan_s:.3f}, load {stats.load_s:.3f}, "
        f"prefill {stats.prefill_s:.2f}); "
        f"{stats.tokens_prompt} prompt tokens: {stats.tokens_reused} reused, {stats.tokens_recomputed} "
        f"recomputed{spared}, {stats.tokens_computed} computed",
        style="dim",
    )
    if stats.remote not in (None, "answered"):
        warn(f"answered without the remote: {stats.remote}")
