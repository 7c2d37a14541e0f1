"""`cachecraft store …`: inspect, check and evict chunk-caches."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cachecraft_rag.checks import check_number
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import (
    counted,
    megabytes,
    print_json,
    print_table,
    progress_bar,
    takes,
)
from cachecraft_rag.cli.prime import From, read_chunks
from cachecraft_rag.engine.settings import Settings
from cachecraft_rag.errors import ConfigError, StoreError
from cachecraft_rag.types.documents import chunk_id_of

if TYPE_CHECKING:
    from cachecraft_rag.store import ChunkCacheStore, Listed
    from cachecraft_rag.store.remote import RemoteConfig

SHORTEST_PREFIX = 4
LIMITS = ("disk_bytes", "max_variants", "variants_per_chunk", "eviction")
ID_LETTERS = 8  # nine columns fit a terminal of 80

app = typer.Typer(
    help="Inspect, check and evict stored chunk-caches.", no_args_is_help=True, add_completion=False
)


@contextmanager
def opened(
    folder: Path, remote: RemoteConfig | None = None, **settings: Any
) -> Iterator[ChunkCacheStore]:
    """Open the store inside a folder, or in the folder itself if it is an engine's own store, for the block.

    StoreError if there is none. Limits among `settings`, fields of `StoreConfig`, are changed for all processes.
    """
    from cachecraft_rag.store import CATALOG_FILE, ChunkCacheStore
    from cachecraft_rag.store.config import CACHE_FOLDER

    # os.path, because pathlib raises for paths it cannot reach instead of returning False.
    place = folder if os.path.isfile(folder / CATALOG_FILE) else folder / CACHE_FOLDER
    if not os.path.isdir(place):
        raise StoreError(
            f"{folder} holds no chunk-caches; name the folder with --store, or make some with "
            f"`cachecraft index DIR --prime --store {folder}`"
        )
    with ChunkCacheStore.open(place, remote=remote, **settings) as caches:
        yield caches


def begins(chunk: str | None) -> str | None:
    """Return the value of --chunk unchanged, None without it. Raises ConfigError if it has fewer than 4 letters."""
    if chunk is not None and len(chunk) < SHORTEST_PREFIX:
        raise ConfigError(
            f"--chunk needs at least {SHORTEST_PREFIX} letters of a chunk id; `store ls` shows them"
        )
    return chunk


@app.command()
@takes("store")
def ls(
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows to show.")] = 50,
    offset: Annotated[int, typer.Option("--offset", min=0, help="Rows to skip.")] = 0,
    chunk: Annotated[
        str | None, typer.Option("--chunk", help="Only chunks whose id begins with this.")
    ] = None,
    as_json: options.Json = False,
    *,
    settings: Settings,
) -> None:
    """List the variants of all namespaces, highest eviction score first: those are kept longest.

    Columns: the first letters of its id and of its chunk's id, the number of segments in its origin prefix, its tokens,
    its CCI, the exact share of its origin prefix, f_r (how much it was used), its size in memory, and its namespace.
    --json prints every field in full. Exit code 2 if there is no store, or --chunk has fewer than 4 letters.
    """
    # Raises StoreError and ConfigError; see `app.main` for exit codes.
    from cachecraft_rag.store import RowFilter

    with opened(Path(settings["store"])) as caches:
        rows = caches.rows(RowFilter(chunk_prefix=begins(chunk)), offset=offset, limit=limit)
        total = caches.stats().variants
    if as_json:
        print_json([_as_dict(row) for row in rows])
        return
    shown = []
    for row in rows:
        variant = row.variant
        key = variant.key
        shown.append(
            (
                variant.variant_id[:ID_LETTERS],
                key.chunk_id[:ID_LETTERS],
                len(key.origin_prefix),
                variant.tokens,
                f"{variant.cci:.3f}",
                f"{variant.exact_share:.0%}",
                f"{variant.reuse_frequency:.1f}",
                megabytes(variant.nbytes),
                key.namespace + (" (private)" if variant.session else ""),
            )
        )
    print_table(
        ("variant", "chunk", "prefix", "tokens", "CCI", "exact", "f_r", "size", "namespace"), shown
    )
    out.print(f"{len(rows)} of {total} variants")


def _as_dict(row: Listed) -> dict[str, object]:
    """A row for --json, without the fields that only a look-up for a model fills in."""
    fields_of_row = asdict(row)
    del fields_of_row["variant"]["payload_facts"]
    return fields_of_row


@app.command()
@takes("store", "remote.url", "remote.key_file")
def stats(
    as_json: options.Json = False,
    *,
    settings: Settings,
) -> None:
    """Number, size and budgets of the chunk-caches, and calibrations; with --remote also what engines share there.

    A remote that does not answer is shown as such and is no error. Exit code 2 if there is no store, or a setting is
    wrong.
    """
    # Raises StoreError and ConfigError; see `app.main` for exit codes.
    from cachecraft_rag.planning.calibration import all_calibrations

    store = Path(settings["store"])
    with opened(store, settings.remote()) as caches:
        numbers = caches.stats()
    calibrated = all_calibrations(store)
    if as_json:
        print_json(
            asdict(numbers)
            | {"calibrations": {name: asdict(value) for name, value in calibrated.items()}}
        )
        return
    out.print(f"{counted(numbers.variants, 'variant')} of {counted(numbers.chunks, 'chunk')}")
    out.print(f"disk {megabytes(numbers.disk_bytes)} of {megabytes(numbers.disk_budget)}")
    if (shared := numbers.remote) is not None:
        sizes = "does not answer"
        if shared.variants is not None and shared.nbytes is not None:
            sizes = f"{counted(shared.variants, 'variant')}, {megabytes(shared.nbytes)}"
            sizes += f" of {megabytes(shared.budget)}" if shared.budget else ""
        out.print(f"remote {shared.url}: {sizes}", soft_wrap=True)
    for fingerprint, calibration in calibrated.items():
        out.print(f"model {fingerprint[:ID_LETTERS]}: {calibration}", soft_wrap=True)


@app.command()
@takes("store")
def check(
    repair: Annotated[bool, typer.Option("--repair", help="Repair the findings.")] = False,
    as_json: options.Json = False,
    *,
    settings: Settings,
) -> None:
    """Compare catalog and files and verify every checksum. Exit code 1 if something is wrong and was not repaired.

    Foreign files and a damaged SQLite file are never repaired. Exit code 2 if there is no store, or it cannot be read,
    or with --repair not be written.
    """
    # Raises typer.Exit(1), StoreError and ConfigError; see `app.main` for exit codes.
    with opened(Path(settings["store"])) as caches, progress_bar("Checking") as show:
        report = caches.check(repair=repair, progress=show)
    if as_json:
        print_json(asdict(report))
    else:
        for finding in report.findings:
            out.print(f"{finding.kind}: {finding.path}: {finding.what} → {finding.action}")
        verdict = "all sound" if not report.findings else counted(len(report.findings), "finding")
        out.print(
            f"{counted(report.rows, 'variant')}, {counted(report.files, 'file')}, {megabytes(report.nbytes)}: {verdict}"
        )
    if not all(finding.repaired for finding in report.findings):
        raise typer.Exit(1)


@app.command()
@takes("store", *LIMITS)
def limits(as_json: options.Json = False, *, settings: Settings) -> None:
    """Show the store's limits, and set those given as flags, for all processes that open it from now on.

    Exit code 2 if there is no store, or a limit is out of range.
    """
    # Raises StoreError and ConfigError; see `app.main` for exit codes.
    chosen = {key: value for key, value in settings.flags().items() if key in LIMITS}
    with opened(Path(settings["store"]), None, **chosen) as caches:
        kept = asdict(caches.limits) | {"eviction": caches.eviction}
    if as_json:
        print_json(kept)
    else:
        for name, value in kept.items():
            out.print(
                f"{name.replace('_', ' ')}: {value:,}"
                if isinstance(value, int)
                else f"{name}: {value}"
            )


@app.command()
@takes("store", "namespace")
def sync(source: From, as_json: options.Json = False, *, settings: Settings) -> None:
    """Keep the chunk-caches of these texts and of instructions; all others of the namespace are removed for good.

    For a database that has deleted documents: give it all texts that the database still holds, as for `prime`. Passages
    of unmarked prompts leave too. Those that leave are not stored again until `sync` or `prime` is given the text.

    Exit code 2 if a line is in another form, without any line, and without a store that can be written.
    """
    # Raises StoreError and ConfigError; see `app.main` for exit codes.
    from cachecraft_rag.prompt.builder import STAND_IN

    held = {chunk.chunk_id for chunk in read_chunks(source)}
    with opened(Path(settings["store"])) as caches:
        held.add(chunk_id_of(STAND_IN))
        gone = caches.sync_chunks(held, namespace=settings["namespace"])
    if as_json:
        print_json(asdict(gone))
    else:
        out.print(f"{counted(gone.variants, 'variant')} removed, {megabytes(gone.nbytes)} freed")


@dataclass(frozen=True)
class EvictOptions:
    """Options of `store evict`.

    chunk            variants of chunks whose id begins with this
    namespace        variants of this tenant
    fingerprint      variants of this model fingerprint
    older_than_days  variants captured longer ago than this
    down_to_mb       stop when the whole store takes this many MB
    all              remove everything
    """

    chunk: str | None = None
    namespace: str | None = None
    fingerprint: str | None = None
    older_than_days: float | None = None
    down_to_mb: float | None = None
    all: bool = False

    def __post_init__(self) -> None:
        """Check what is asked for; raises ConfigError."""
        check_number("--older-than-days", self.older_than_days, optional=True)
        check_number("--down-to-mb", self.down_to_mb, optional=True)
        given = [
            option.name for option in fields(self) if getattr(self, option.name) != option.default
        ]
        if not given:
            flags = [f"--{option.name.replace('_', '-')}" for option in fields(self)]
            raise ConfigError(f"say what to evict: {', '.join(flags[:-1])} or {flags[-1]}")
        if self.all and given != ["all"]:
            raise ConfigError("--all removes everything: leave it out, or the other options")


@app.command()
@takes("store", chosen=EvictOptions)
def evict(as_json: options.Json = False, *, settings: Settings, chosen: EvictOptions) -> None:
    """Remove the chunk-caches that match every option, lowest eviction score first.

    They are computed again when needed; documents stay, and chunk-caches on a remote. No match is no error. Exit code 2
    if no option says what to evict, --chunk has fewer than 4 letters, or there is no store that can be written.
    """
    # Raises StoreError and ConfigError; see `app.main` for exit codes.
    from cachecraft_rag.store import RowFilter

    before = (
        None if chosen.older_than_days is None else time.time() - chosen.older_than_days * 86400
    )
    rows = RowFilter(
        namespace=chosen.namespace,
        fingerprint=chosen.fingerprint,
        chunk_prefix=begins(chosen.chunk),
        created_before=before,
    )
    down_to = 0 if chosen.all else None
    if chosen.down_to_mb is not None:
        down_to = int(min(chosen.down_to_mb, 1e12) * 1e6)
    with opened(Path(settings["store"])) as caches:
        gone = caches.evict(rows, down_to_bytes=down_to)
    if as_json:
        print_json(asdict(gone))
    else:
        out.print(f"{counted(gone.variants, 'variant')} removed, {megabytes(gone.nbytes)} freed")
