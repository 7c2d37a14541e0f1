"""What the commands share: their common options, the two consoles, and how results and errors are printed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from cachecraft_rag.checks import MOST
from cachecraft_rag.cli.console import as_json, console_on
from cachecraft_rag.errors import CacheCraftError, ConfigError

MOST_THREADS = 1024
if TYPE_CHECKING:
    from cachecraft_rag.store.remote import RemoteConfig

Store = Annotated[Path, typer.Option("--store", "-s", help="Folder of the retrieval index and the chunk-caches.")]
Remote = Annotated[
    str | None,
    typer.Option(
        "--remote", help="Share chunk-caches through redis://…, s3://… or another remote, see docs/remote.md."
    ),
]
RemoteKeyFile = Annotated[
    Path | None,
    typer.Option("--remote-key-file", help="Sign what is shared, believe nothing else: a file with the engines' key."),
]
Model = Annotated[
    str,
    typer.Option("--model", "-m", help='Hugging Face name or folder, or "demo": the embedded SmolLM2-135M-Instruct.'),
]
Embeddings = Annotated[
    str | None,
    typer.Option("--embeddings", help="sentence-transformers model for retrieval.", show_default="the embedded one"),
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or auto.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 … or auto.")]
Namespace = Annotated[str, typer.Option("--namespace", help="Tenant of chunk-caches (the index is per --store).")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, max=MOST_THREADS, help="CPU threads.", show_default="torch's choice")
]
Seed = Annotated[int | None, typer.Option("--seed", min=-MOST - 1, max=MOST, help="Seed of sampled answers.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON, and nothing else, on stdout.")]
TopK = Annotated[int, typer.Option("--top-k", "-k", min=1, help="Chunks to retrieve.")]
Ratio = Annotated[
    float | None,
    typer.Option(
        "--recompute-ratio",
        min=0.0,
        max=1.0,
        help="Recompute this share of the moved chunks.",
        show_default="CFO decides",
    ),
]
Focus = Annotated[
    str, typer.Option("--focus", help="Early termination of unfocused chunks: off, share, gap or printed.")
]
MaxTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 = greedy.")]

DEFAULT_STORE = Path("chunk-caches")


out = console_on(sys.stdout)
err = console_on(sys.stderr)


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    typer.echo(as_json(value))


def print_error(error: CacheCraftError, advice: str = "") -> None:
    """An error on stderr, with advice that its message could not know of."""
    err.print("error:", style="bold red", end=" ")
    err.print(f"{error} {advice}".strip(), highlight=False, soft_wrap=True)


def remote_of(url: str | None, key_file: Path | None) -> RemoteConfig | None:
    """The remote that --remote and --remote-key-file mean. Raises ConfigError."""
    if url is None:
        if key_file is not None:
            raise ConfigError("--remote-key-file needs --remote: there is nothing to sign without one")
        return None
    from cachecraft_rag.store.remote import RemoteConfig

    config = RemoteConfig(url, key_file=key_file)
    config.keys()  # what is wrong with them is said before a model is loaded
    return config


def set_threads(threads: int | None) -> None:
    """Let torch use so many CPU threads."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def quiet_libraries() -> None:
    """Keep the progress bars of the libraries below us off the terminal; ours say more."""
    import transformers.utils.logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr with a text that can be changed."""
    with err.status(Text(text)) as status:
        yield lambda message: status.update(Text(f"{text}: {message}"))


@contextmanager
def progress_bar(text: str, *, remaining: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, moved by calls with (done, total) and, if there is more to tell, a note.

    `remaining` shows the time that is left, for work whose parts take about as long each.
    """
    columns: list[ProgressColumn] = [
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *([TextColumn("left:"), TimeRemainingColumn()] if remaining else []),
        TextColumn("{task.fields[note]}", markup=False),
    ]
    with Progress(*columns, console=err, transient=False) as bar:
        task = bar.add_task(text, total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)


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
        raise ConfigError(f"{text!r} is no list of numbers; write for example 0.5,1,2")
    return found


def megabytes(nbytes: int) -> str:
    """Bytes as megabytes, for people.

    >>> megabytes(1_500_000)
    '1.5 MB'
    """
    return f"{nbytes / 1e6:.1f} MB"
