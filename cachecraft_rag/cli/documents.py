"""`cachecraft documents …`: list indexed documents, and remove them with their chunk-caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cachecraft_rag.cli import options
from cachecraft_rag.cli.ask import opened_caches, require_index
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import counted, print_json, print_table, takes
from cachecraft_rag.engine.settings import Settings

if TYPE_CHECKING:
    from cachecraft_rag.retrievers.index.faiss_store import FaissStore

app = typer.Typer(
    help="List indexed documents, and remove them with their chunk-caches.",
    no_args_is_help=True,
    add_completion=False,
)


@contextmanager
def opened(store: Path) -> Iterator[FaissStore]:
    """Open the retrieval index of a store folder for the block. No model is loaded.

    Nothing is created: IndexStoreError if the store has no index.
    """
    require_index(store)
    from cachecraft_rag.retrievers.index.faiss_store import FaissStore
    from cachecraft_rag.retrievers.retriever import INDEX_FOLDER

    with FaissStore.open(store / INDEX_FOLDER) as index:
        yield index


@app.command()
@takes("store")
def ls(as_json: options.Json = False, *, settings: Settings) -> None:
    """List the documents by name, with the number of their chunks and the folder they were read from.

    Exit code 2 if the store has no index, or a damaged one; an empty index is no error.
    """
    # Raises ConfigError and IndexStoreError; see `app.main` for exit codes.
    with opened(Path(settings["store"])) as index:
        documents = index.documents()
    if as_json:
        print_json([asdict(document) for document in documents])
        return
    rows = [(document.doc_id, document.chunks, document.root) for document in documents]
    print_table(("document", "chunks", "folder"), rows)
    out.print(counted(len(documents), "document"))


@app.command()
@takes("store")
def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Documents as `documents ls` shows them, or docs/ for all of a folder."
        ),
    ],
    as_json: options.Json = False,
    *,
    settings: Settings,
) -> None:
    """Remove documents from the index, and the chunk-caches of chunks that no other document has.

    Those captured after such a chunk leave too. Files stay where they are: `cachecraft index` of their folder brings
    them back. Exit code 2 if a name matches no document (nothing is removed), or the index or store cannot be used.
    """
    # Raises DocumentError, ConfigError, IndexStoreError and StoreError; see `app.main` for exit codes.
    from cachecraft_rag.retrievers.index.removal import remove_documents

    store = Path(settings["store"])
    with opened(store) as index, opened_caches(store) as caches:
        removed = remove_documents(index, names, caches=caches)
        index.save()
    if as_json:
        print_json(asdict(removed))
        return
    out.print(
        f"{counted(len(removed.documents), 'document')}, {counted(len(removed.chunk_ids), 'chunk')} and "
        f"{counted(removed.chunk_caches, 'chunk-cache')} removed, {options.megabytes(removed.nbytes)} freed"
    )
