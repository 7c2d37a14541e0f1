"""`cachecraft documents …`: list indexed documents, and remove them with their chunk-caches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cachecraft_rag.cli import options
from cachecraft_rag.cli.ask import require_index
from cachecraft_rag.cli.options import DEFAULT_STORE, out, print_json

if TYPE_CHECKING:
    from cachecraft_rag.retrievers.faiss_store import FaissStore

app = typer.Typer(help="List indexed documents, and remove them with their chunk-caches.", no_args_is_help=True)


@contextmanager
def opened(store: Path) -> Iterator[FaissStore]:
    """The retrieval index of a store folder; no model is loaded and nothing is created."""
    require_index(store)
    from cachecraft_rag.retrievers.faiss_store import FaissStore
    from cachecraft_rag.retrievers.retriever import INDEX_FOLDER

    with FaissStore.open(store / INDEX_FOLDER) as index:
        yield index


@app.command()
def ls(store: options.Store = DEFAULT_STORE, as_json: options.Json = False) -> None:
    """List the documents, with the number of their chunks and the folder they were read from."""
    with opened(store) as index:
        found = index.documents()
    if as_json:
        print_json([asdict(document) for document in found])
        return
    table = Table(box=None, pad_edge=False)
    for name in ("document", "chunks", "folder"):
        table.add_column(name, overflow="fold")
    for document in found:
        table.add_row(document.doc_id, str(document.chunks), document.root)
    out.print(table)
    out.print(f"{len(found)} documents", highlight=False)


@app.command()
def remove(
    names: Annotated[
        list[str], typer.Argument(help="Documents as `documents ls` shows them, or docs/ for all of a folder.")
    ],
    store: options.Store = DEFAULT_STORE,
    as_json: options.Json = False,
) -> None:
    """Remove documents from the index, and the chunk-caches of chunks that no other document has.

    Files stay where they are: `cachecraft index` of their folder brings them back.
    """
    from cachecraft_rag.engine.base import CACHE_FOLDER
    from cachecraft_rag.retrievers.removal import remove_documents
    from cachecraft_rag.store import ChunkCacheStore

    with opened(store) as index:
        if os.path.isdir(store / CACHE_FOLDER):
            with ChunkCacheStore.open(store / CACHE_FOLDER) as caches:
                removed = remove_documents(index, names, caches=caches)
        else:
            removed = remove_documents(index, names)
        index.save()
    if as_json:
        print_json(asdict(removed))
        return
    out.print(
        f"{len(removed.documents)} documents, {len(removed.chunk_ids)} chunks and {removed.chunk_caches} chunk-caches "
        f"removed, {options.megabytes(removed.nbytes)} freed",
        highlight=False,
    )
