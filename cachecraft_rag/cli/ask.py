"""`cachecraft index` and `ask`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cachecraft_rag.cli import options
from cachecraft_rag.cli.option_groups import CacheOptions, ComputeOptions, SamplingOptions, takes
from cachecraft_rag.cli.options import DEFAULT_STORE, err, megabytes, out, print_json, progress_bar, waiting
from cachecraft_rag.errors import IndexStoreError, ModelNotFoundError
from cachecraft_rag.retrievers.documents import SUFFIXES, require_readable

if TYPE_CHECKING:
    from cachecraft_rag.engine.chunk_bound import ModelTokens
    from cachecraft_rag.engine.config import EngineConfig
    from cachecraft_rag.engine.priming import PrimingEstimate
    from cachecraft_rag.engine.stats import RequestStats
    from cachecraft_rag.rag import AnswerStream, CacheCraft
    from cachecraft_rag.retrievers.indexer import IndexReport


def require_index(store: Path) -> None:
    """Raise IndexStoreError unless documents have been indexed: before a model is loaded or a folder is made."""
    from cachecraft_rag.retrievers.retriever import INDEX_FOLDER

    if not os.path.isdir(store / INDEX_FOLDER):  # pathlib raises for paths it cannot reach instead of returning False
        raise IndexStoreError(
            f"{store} holds no documents yet; add some with `cachecraft index DIR --store {store}`, or name another "
            "folder with --store"
        )


def load(
    model: str,
    store: Path,
    config: EngineConfig,
    *,
    embeddings: str | None = None,
    server: str | None = None,
    system: str | None = None,
) -> CacheCraft:
    """Open a `CacheCraft`, with a spinner while the model loads; over a server, where one is named.

    Args:
        system: the instruction, where it was chosen; `config` has it too.
    """
    with waiting(f"Loading {model}" if server is None else f"Connecting to {server}"):
        from cachecraft_rag.rag import CacheCraft

        options.quiet_libraries()
        chosen = {} if embeddings is None else {"embeddings": embeddings}
        if server is not None:
            return CacheCraft.connect(server, store=store, system=system, **chosen)
        return CacheCraft.from_pretrained(model, store=store, config=config, **chosen)


@takes(compute=ComputeOptions, caches=CacheOptions)
def index(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="Folder or file: text, Markdown, HTML, PDF, Word, CSV, JSON.")],
    store: options.Store = DEFAULT_STORE,
    prime: Annotated[
        bool, typer.Option("--prime", help="Also compute all chunk-caches now, so that the first question is fast too.")
    ] = False,
    alone: Annotated[
        bool,
        typer.Option(
            "--alone",
            help="With --prime: each chunk without its neighbours. Good with the learned correction of calibrate.",
        ),
    ] = False,
    model: options.Model = "demo",
    embeddings: options.Embeddings = None,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="Also index files outside the folder that links in it point to.")
    ] = False,
    as_json: options.Json = False,
    *,
    compute: ComputeOptions,
    caches: CacheOptions,
) -> None:
    """Index documents. Embeds only those that changed since the last run, and removes those that no longer exist."""
    options.set_threads(compute.threads)
    config = caches.engine_config(context.obj, compute=compute)
    require_readable(folder)  # before the models are loaded and a store is made
    report = index_into(store, folder, model=model, embeddings=embeddings, follow_links=follow_links)
    evict_removed(store, report)
    primed = Primed(None, None, ())
    if prime:
        with load(model, store, config, embeddings=embeddings) as rag:
            primed = prime_all(rag, alone=alone)
    if as_json:
        print_json(asdict(report) | asdict(primed))
    else:
        print_index_report(report, primed)


def index_into(store: Path, folder: Path, *, model: str, embeddings: str | None, follow_links: bool) -> IndexReport:
    """Index a folder or file with the embedding model alone; of the answering model only the tokenizer is loaded."""
    with waiting("Loading the embedding model"):
        from cachecraft_rag.retrievers.embeddings import BUNDLED_EMBEDDER, Embedder
        from cachecraft_rag.retrievers.indexer import index_folder
        from cachecraft_rag.retrievers.retriever import open_index

        options.quiet_libraries()
        embedder = Embedder(embeddings or BUNDLED_EMBEDDER)
        bound = chunk_bound(model)
    with progress_bar("Indexing") as show, open_index(store, embedder) as found:
        return index_folder(folder, found, embedder, progress=show, model=bound, follow_links=follow_links)


@dataclass(frozen=True)
class Primed:
    """The result of --prime; None without it. `not_primed` are sentences about documents with chunks that were left."""

    captured: int | None
    estimate: PrimingEstimate | None
    not_primed: tuple[str, ...]


def prime_all(rag: CacheCraft, *, alone: bool = False) -> Primed:
    """Say what priming will take, and do it."""
    estimate, skipped = rag.estimate_priming(alone=alone), list[str]()
    print_estimate(estimate, rag.engine.store.config.codec)
    with progress_bar("Computing chunk-caches", remaining=True) as show:
        captured = rag.prime(alone=alone, progress=show, skipped=skipped.append)
    return Primed(captured, estimate, tuple(skipped))


def print_estimate(estimate: PrimingEstimate, codec: str) -> None:
    """What priming will compute and store, before it starts; a warning if not all of it can stay."""
    err.print(
        f"to compute: {estimate.captures} chunk-caches, {estimate.tokens:,} tokens, "
        f"{megabytes(estimate.nbytes)} on disk ({codec}); the store takes {megabytes(estimate.disk_used)} of "
        f"{megabytes(estimate.disk_budget)}, {megabytes(estimate.disk_free)} of the disk are free",
        highlight=False,
        soft_wrap=True,
    )
    if not estimate.fits:
        err.print(
            "That is more than fits: the least useful chunk-caches will be removed. Raise --disk-mb, or choose a "
            "smaller --codec (docs/sizes.md).",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def chunk_bound(model: str) -> ModelTokens | None:
    """The longest chunk that suits the model; None if the model is not installed, because indexing works without."""
    from cachecraft_rag.engine.decoder import chunk_bound_of

    try:
        return chunk_bound_of(model)
    except ModelNotFoundError:
        return None


def evict_removed(store: Path, report: IndexReport) -> None:
    """Remove the chunk-caches of chunks that no document contains any more."""
    from cachecraft_rag.engine.base import CACHE_FOLDER
    from cachecraft_rag.store import ChunkCacheStore, RowFilter

    if report.removed_chunk_ids and (store / CACHE_FOLDER).is_dir():
        with ChunkCacheStore.open(store / CACHE_FOLDER) as caches:
            caches.evict(RowFilter(chunk_ids=report.removed_chunk_ids))


def print_index_report(report: IndexReport, primed: Primed) -> None:
    """The report in two or three lines."""
    out.print(
        f"{len(report.added)} documents added, {len(report.updated)} updated, {len(report.removed)} removed, "
        f"{len(report.unchanged)} unchanged; {report.chunks_embedded} chunks embedded in {report.seconds:.1f} s"
    )
    if primed.captured is not None:
        out.print(f"{primed.captured} chunk-caches computed")
    for problem in report.problems:
        err.print(f"left out {problem.reason}", style="yellow", highlight=False)
    if not any((report.added, report.updated, report.removed, report.unchanged)):
        err.print(f"nothing was found to index; files end in {', '.join(SUFFIXES)}", style="yellow", highlight=False)
    for sentence in primed.not_primed:
        err.print(sentence, style="yellow", markup=False, highlight=False)


@takes(compute=ComputeOptions, caches=CacheOptions, sampling=SamplingOptions)
def ask(
    context: typer.Context,
    question: Annotated[str, typer.Argument(help="Your question.")],
    store: options.Store = DEFAULT_STORE,
    model: options.Model = "demo",
    embeddings: options.Embeddings = None,
    top_k: options.TopK = 5,
    max_new_tokens: options.MaxTokens = 128,
    recompute_ratio: options.Ratio = None,
    early_termination: options.EarlyTermination = "off",
    reuse: Annotated[bool, typer.Option("--reuse/--no-reuse", help="Reuse stored chunk-caches.")] = True,
    where: options.WhereOption = None,
    server: options.Server = None,
    as_json: options.Json = False,
    *,
    compute: ComputeOptions,
    caches: CacheOptions,
    sampling: SamplingOptions,
) -> None:
    """Answer one question over the indexed documents."""
    options.set_threads(compute.threads)
    how = {"reuse": reuse, "recompute_ratio": recompute_ratio, "early_termination": early_termination}
    config = caches.engine_config(context.obj, compute=compute, reuse=how)
    drawn = sampling.params(max_new_tokens)
    allowed = options.where_of(where)
    require_index(store)
    with load(model, store, config, embeddings=embeddings, server=server, system=caches.system) as rag:
        chosen = None if server is None else config.reuse  # in this process the engine has it
        stream = rag.stream(question, top_k=top_k, where=allowed, sampling=drawn, config=chosen)
        if as_json:
            print_json(stream.answer().as_dict())
        else:
            print_answer(rag, stream)


def print_answer(rag: CacheCraft, stream: AnswerStream) -> None:
    """An answer, its sources and its numbers."""
    print_stream(stream)
    print_sources(stream)
    print_stats(stream.stats)
    print_calibration(rag)


def print_stream(stream: AnswerStream) -> None:
    """The answer, piece by piece as it is generated."""
    for piece in stream:
        out.print(piece, end="", highlight=False, soft_wrap=True)
    out.print()


def print_sources(stream: AnswerStream) -> None:
    """The source of each chunk, and how its chunk-cache was used."""
    reports = {chunk.chunk_id: chunk for chunk in stream.stats.chunks}
    table = Table(box=None)
    for name in ("#", "source", "heading", "score", "tokens", "chunk-cache", "recomputed", "computed", "tier"):
        table.add_column(
            name, overflow="fold", no_wrap=name in ("#", "score", "tokens", "recomputed", "computed", "tier")
        )
    for place, source in enumerate(stream.sources, start=1):
        chunk = reports[source.chunk_id]
        outcome = chunk.outcome if not chunk.reason else f"{chunk.outcome}: {chunk.reason}"
        score = "" if source.score is None else f"{source.score:.2f}"
        where, heading = (str(source.metadata.get(key) or "") for key in ("source", "heading"))
        table.add_row(
            str(place),
            where,
            heading,
            score,
            str(chunk.tokens),
            outcome,
            str(chunk.recomputed),
            str(chunk.computed),
            chunk.tier or "",
        )
    out.print(table)


def print_calibration(rag: CacheCraft) -> None:
    """One line if a calibrated α decides how much is recomputed."""
    found = rag.engine.calibration_for(rag.engine.config)
    if rag.engine.config.reuse and found is not None:
        out.print(str(found), style="dim", highlight=False)


def print_stats(stats: RequestStats) -> None:
    """One line of numbers."""
    out.print(
        f"first token after {stats.ttft_s:.2f} s (plan {stats.plan_s:.3f}, load {stats.load_s:.3f}, "
        f"prefill {stats.prefill_s:.2f}); "
        f"{stats.tokens_prompt} prompt tokens: {stats.tokens_reused} reused, {stats.tokens_recomputed} recomputed, "
        f"{stats.tokens_computed} computed",
        style="dim",
        highlight=False,
    )
    if stats.remote not in (None, "answered"):
        err.print(f"answered without the remote: {stats.remote}", style="yellow")
