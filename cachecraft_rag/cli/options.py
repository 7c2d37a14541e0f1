"""What the commands share: single options, progress bars, output of results and errors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import progress as bars
from rich.text import Text

from cachecraft_rag.checks import MOST, check_number
from cachecraft_rag.cli.console import as_json, console_on
from cachecraft_rag.errors import CacheCraftError, ConfigError
from cachecraft_rag.types import Metadata, Progress

MOST_THREADS = 1024
if TYPE_CHECKING:
    from cachecraft_rag.store.remote import RemoteConfig

Store = Annotated[Path, typer.Option("--store", "-s", help="Folder of the retrieval index and the chunk-caches.")]
Remote = Annotated[
    str | None,
    typer.Option(
        "--remote", help="Share chunk-caches through redis://…, s3://… or another remote; see docs/remote.md."
    ),
]
RemoteKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--remote-key-file", help="File with the key of all engines: sign shared chunk-caches, use only signed ones."
    ),
]
Model = Annotated[
    str,
    typer.Option("--model", "-m", help='Hugging Face name or folder, or "demo" for the bundled SmolLM2-135M-Instruct.'),
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        help="Ask the model of a server that `cachecraft serve` started, such as http://127.0.0.1:8000. Options about "
        "the model and its chunk-caches are then the server's own.",
    ),
]
Embeddings = Annotated[
    str | None,
    typer.Option("--embeddings", help="sentence-transformers model for retrieval.", show_default="the bundled one"),
]
Dtype = Annotated[str, typer.Option("--dtype", help="Number format of the model: float32, bfloat16, float16 or auto.")]
Device = Annotated[str, typer.Option("--device", help="Where the model runs: cpu, cuda, cuda:1 … or auto.")]
Namespace = Annotated[
    str, typer.Option("--namespace", help="Tenant. Chunk-caches are not shared with other tenants; the index is.")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=MOST_THREADS, help="CPU threads.", show_default="torch's choice"),
]
Seed = Annotated[int | None, typer.Option("--seed", min=-MOST - 1, max=MOST, help="Makes sampled answers repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON, and nothing else, on stdout.")]
TopK = Annotated[int, typer.Option("--top-k", "-k", min=1, help="Chunks to retrieve.")]
Ratio = Annotated[
    float | None,
    typer.Option(
        "--recompute-ratio",
        min=0.0,
        max=1.0,
        help="Share of each moved chunk's tokens to recompute; 1 is exact.",
        show_default="decided for each chunk",
    ),
]
EarlyTermination = Annotated[
    str,
    typer.Option(
        "--early-termination", help="Stop early for chunks the question does not look at: off, share, gap, printed."
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-new-tokens", "--max-tokens", min=1, help="Longest answer, in tokens.")]
TopP = Annotated[float, typer.Option("--top-p", help="Sample from the likeliest tokens with this probability.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the answer; may be repeated.")]
System = Annotated[
    str | None,
    typer.Option(
        "--system",
        help="Instruction before every prompt. Chunk-caches belong to it: prime and ask with the same one.",
        show_default="the built-in one",
    ),
]
WhereOption = Annotated[
    list[str] | None,
    typer.Option(
        "--where", help="Only chunks with this metadata: source=docs/kettle.md, or source=docs/* ; may be repeated."
    ),
]
Codec = Annotated[
    str, typer.Option("--codec", help="How new chunk-caches are written: raw (exact), int8 or entropy (smaller).")
]
DiskMB = Annotated[
    float | None,
    typer.Option("--disk-mb", min=1, help="Limit of all files; stays with the store.", show_default="as it was set"),
]
MemoryMB = Annotated[
    float | None, typer.Option("--memory-mb", min=0, help="Memory for chunk-caches.", show_default="2147 MB")
]
MaxVariants = Annotated[
    int | None,
    typer.Option("--max-variants", min=1, help="N×M: variants in all; stays with the store.", show_default=False),
]
VariantsPerChunk = Annotated[
    int | None,
    typer.Option(
        "--variants-per-chunk", min=1, help="Most variants of one chunk; stays with the store.", show_default=False
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option("--metrics-port", min=0, max=65535, help="Serve Prometheus metrics on this port of this machine."),
]
NewVariantsOption = Annotated[
    str,
    typer.Option(
        "--new-variants", help="Capture what was fixed behind the prefix it had: idle (between answers), always, off."
    ),
]
NewVariantsShare = Annotated[
    float,
    typer.Option(
        "--new-variants-share", min=0.0, help="Tokens computed for new variants, per prompt token that was served."
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the most likely token each time.")]

DEFAULT_STORE = Path("chunk-caches")


out = console_on(sys.stdout)
err = console_on(sys.stderr)


def nbytes(megabytes: float | None) -> int | None:
    """Megabytes of an option in bytes; None stays None.

    >>> nbytes(1.5)
    1500000
    """
    if megabytes is None:
        return None
    check_number("a size in MB", megabytes, most=1e12)
    return int(megabytes * 1e6)


def where_of(conditions: list[str] | None) -> Callable[[Metadata], bool] | None:
    """The filter of --where. Conditions on one name are alternatives, those on different names must all hold.

    Values are compared as text, and `*`, `?` and `[…]` match as in file names. Raises ConfigError.

    >>> allowed = where_of(["source=docs/*", "page=2", "page=3"])
    >>> [allowed(found) for found in ({"source": "docs/a.pdf", "page": 3}, {"source": "docs/a.pdf", "page": 1}, {})]
    [True, False, False]
    """
    if not conditions:
        return None
    patterns: dict[str, list[str]] = {}
    for condition in conditions:
        name, sign, value = condition.partition("=")
        if not sign or not name.strip():
            raise ConfigError(f"--where is {condition!r}; write NAME=VALUE, for example source=docs/kettle.md")
        patterns.setdefault(name.strip(), []).append(value.strip())

    def allowed(metadata: Metadata) -> bool:
        return all(
            name in metadata and any(fnmatchcase(str(metadata[name]), pattern) for pattern in choices)
            for name, choices in patterns.items()
        )

    return allowed


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    typer.echo(as_json(value))


def print_error(error: CacheCraftError, advice: str = "") -> None:
    """An error on stderr, with advice that only the command knows."""
    err.print("error:", style="bold red", end=" ")
    err.print(f"{error} {advice}".strip(), highlight=False, soft_wrap=True)


def remote_of(
    url: str | None, key_file: Path | None, settings: RemoteConfig | str | None = None
) -> RemoteConfig | None:
    """The remote of --remote and --remote-key-file, with what `settings` say of the same. Raises ConfigError."""
    if url is None:
        if key_file is not None:
            raise ConfigError("--remote-key-file needs --remote: there is nothing to sign without one")
        return None
    from cachecraft_rag.store.remote import RemoteConfig

    config = RemoteConfig(url, key_file=key_file)
    if isinstance(settings, RemoteConfig) and settings.url == url:
        config = replace(settings, key_file=key_file)
    config.keys()  # reports a bad key file before a model is loaded
    return config


def set_threads(threads: int | None) -> None:
    """Limit torch to this number of CPU threads."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def quiet_libraries() -> None:
    """Switch off the progress bars of libraries; the commands show their own."""
    import transformers.utils.logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner on stderr, for work without steps."""
    with err.status(Text(text)):
        yield


@contextmanager
def progress_bar(text: str, *, remaining: bool = False) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on stderr that shows each `Progress` it is called with.

    `remaining` also shows the time left, for work whose steps take about equally long.
    """
    columns: list[bars.ProgressColumn] = [
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        *([bars.TextColumn("left:"), bars.TimeRemainingColumn()] if remaining else []),
        bars.TextColumn("{task.fields[what]}", markup=False),
    ]
    with bars.Progress(*columns, console=err, transient=False) as bar:
        task = bar.add_task(text, total=None, what="")
        yield lambda step: bar.update(task, completed=step.done, total=step.total, what=step.what)


def numbers(text: str) -> list[float]:
    """A comma-separated list of numbers.

    >>> numbers("0.5,1,2")
    [0.5, 1.0, 2.0]
    """
    try:
        found = [float(value) for value in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(map(math.isfinite, found)):
        raise ConfigError(f"{text!r} is not a list of numbers; write for example 0.5,1,2")
    return found


def megabytes(nbytes: int) -> str:
    """Bytes as megabytes, for people.

    >>> megabytes(1_500_000)
    '1.5 MB'
    """
    return f"{nbytes / 1e6:.1f} MB"
