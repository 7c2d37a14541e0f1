"""`cachecraft sizes`: how much disk and memory chunk-caches take."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import megabytes, print_json, print_table, waiting
from cachecraft_rag.errors import ConfigError

SHOWN_TOKENS = 1000


def sizes(
    models: Annotated[
        list[str] | None, typer.Argument(help='Hugging Face names or folders, or "demo".')
    ] = None,
    documents: Annotated[
        Path | None,
        typer.Option(
            "--documents", help="Count the tokens of this folder or file instead of 1,000."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            min=1,
            help="Tokens of all documents together.",
            show_default=str(SHOWN_TOKENS),
        ),
    ] = None,
    dtype: options.Dtype = "auto",
    as_json: options.Json = False,
) -> None:
    """Show how many MB chunk-caches take, for each codec. No documents are indexed.

    It reads configs, and with --documents tokenizers, but no weights; the first use of demo converts its weights.
    Documents that cannot be read are left out, with a warning. Exit code 2 if a model's config cannot be found or
    has no key/value heads, or if there is no folder or readable kind of file at --documents.
    """
    # Raises ConfigError, ModelNotFoundError, UnsupportedModelError and DocumentError; see `app.main` for exit codes.
    if tokens is not None and documents is not None:
        raise ConfigError("give --tokens or --documents, whose tokens are counted, not both")
    from cachecraft_rag.model.sizes import cache_bytes, layout_named
    from cachecraft_rag.store.codecs import CODECS

    options.quiet_libraries()
    rows: list[dict[str, Any]] = []
    for model in models or ["demo"]:
        layout = layout_named(model, dtype=dtype)
        count = _tokens_of(documents, model) if documents is not None else tokens or SHOWN_TOKENS
        sizes = {codec: cache_bytes(layout, count, codec) for codec in CODECS}
        rows.append({"model": model} | asdict(layout) | {"tokens": count, "nbytes": sizes})
    if as_json:
        print_json(rows)
        return
    shown = []
    for row in rows:
        shape = f"{row['layers']} × {row['kv_heads']} × {row['head_dim']}"
        shown.append(
            (
                row["model"],
                shape,
                row["dtype"],
                f"{row['tokens']:,}",
                *map(megabytes, row["nbytes"].values()),
            )
        )
    print_table(("model", "layers × heads × dim", "dtype", "tokens", *CODECS), shown, numbers=True)
    out.print("Each variant takes this on disk; memory keeps it raw. entropy: about.", style="dim")


def _tokens_of(documents: Path, model: str) -> int:
    """Tokens of all readable documents in the model's tokenizer."""
    from cachecraft_rag.errors import DocumentError, MissingPackageError
    from cachecraft_rag.model.checkpoint import chunk_bound_of
    from cachecraft_rag.retrievers.folders import list_files
    from cachecraft_rag.retrievers.reading.limited_reader import LimitedReader

    bound = chunk_bound_of(model)
    total = 0
    with LimitedReader() as reader, waiting(f"Counting tokens of {documents}"):
        for file in list_files(documents).files:
            try:
                total += bound.count(reader.read(file, file.path.read_bytes()).text)
            except (DocumentError, MissingPackageError, OSError) as error:
                options.warn(f"left out {error}")
    return total
