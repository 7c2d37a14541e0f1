"""`cachecraft eval follow-ups`: how often retrieval finds what a follow-up question refers to."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cachecraft_rag.cli import options
from cachecraft_rag.cli.ask import require_index
from cachecraft_rag.cli.options import out, print_json, progress_bar, waiting
from cachecraft_rag.errors import ConfigError

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.retrieval.follow_ups import HitRates

Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        "-d",
        help='File of records with "conversation", "question", "standalone" and "expect"; needs --store.',
        show_default="40 about the sample handbook",
    ),
]
Store = Annotated[
    Path | None, typer.Option("--store", "-s", help="Folder of the retrieval index that the questions are about.")
]


def follow_ups(
    data: Data = None,
    store: Store = None,
    embeddings: options.Embeddings = None,
    top_k: options.TopK = 5,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Compare the hit rates of follow-up questions, alone and with their conversation; no answering model is loaded."""
    if (data is None) != (store is None):
        raise ConfigError("name both --data and --store: the questions and the index of the documents they are about")
    options.set_threads(threads)
    from cachecraft_rag.evaluation.retrieval.follow_ups import OWN, handbook_retriever, hit_rates, read_follow_ups

    asked = read_follow_ups(data or OWN)
    if store is not None:
        require_index(store)
    with ExitStack() as opened:
        with waiting("Loading the embedding model"):
            from cachecraft_rag.retrievers.embeddings import BUNDLED_EMBEDDER, Embedder
            from cachecraft_rag.retrievers.retriever import Retriever, open_index

            options.quiet_libraries()
            embedder = Embedder(embeddings or BUNDLED_EMBEDDER)
            if store is None:
                retriever = opened.enter_context(handbook_retriever(embedder))
            else:
                retriever = Retriever(opened.enter_context(open_index(store, embedder)), embedder)
        with progress_bar("Searching") as show:
            found = hit_rates(retriever, asked, top_k=top_k, progress=show)
    shown = sorted({min(k, top_k) for k in (1, 3, top_k)})
    if as_json:
        rates = {one.way: {str(k): one.at(k) for k in shown} for one in found}
        print_json({"questions": len(asked), "hit_rate": rates, "ranks": {one.way: one.ranks for one in found}})
    else:
        _print(found, shown)


def _print(found: tuple[HitRates, ...], shown: list[int]) -> None:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("searched for")
    for k in shown:
        table.add_column(f"hit rate at {k}", justify="right")
    for one in found:
        table.add_row(one.way, *(f"{one.at(k):.2f}" for k in shown))
    out.print(table)
