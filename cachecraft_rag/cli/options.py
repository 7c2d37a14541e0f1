"""Parts that the commands share: single options, progress bars, output of results and errors."""

from __future__ import annotations

import inspect
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from datetime import timedelta
from functools import wraps
from types import MappingProxyType
from typing import Annotated, Any, TypedDict, get_type_hints

import typer
from rich import progress as bars
from rich.table import Table
from rich.text import Text

from cachecraft_rag.cli.console import as_json, err, out
from cachecraft_rag.engine.settings import descriptions, flag_of, known_settings, load_settings
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.retrievers.index.filters import composed
from cachecraft_rag.server.wire import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from cachecraft_rag.types.documents import Metadata
from cachecraft_rag.types.progress import Progress

_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
PROGRESS_S = 10.0  # between two lines of progress without a terminal
_SHORT = {
    "store": "-s",
    "model": "-m",
    "top_k": "-k",
    "max_new_tokens": "--max-tokens",
    "tensor_parallel_size": "-tp",
}
_SHORT |= {"data": "-d", "out": "-o", "quality": "-q"}
_METAVARS = {
    "int": "INTEGER",
    "float": "FLOAT",
    "Path": "PATH",
    "str": "TEXT",
    "list[str]": "TEXT",
}
_PANELS: Mapping[str, tuple[str, ...]] = {
    "Model": ("model", "dtype", "device", "threads"),
    "Store": (
        "store",
        "namespace",
        "codec",
        "disk_bytes",
        "host_bytes",
        "max_variants",
        "variants_per_chunk",
    ),
    "Retrieval": ("embeddings", "top_k"),
    "Answer": ("system", "max_new_tokens", "temperature", "top_p", "seed", "stop"),
}

Command = Callable[..., None]


def option_of(key: str, **changes: Any) -> Any:
    """Return the option of a setting, for the annotation of a parameter: flags, help and group from its dataclass.

    `changes` are arguments of `typer.Option` in place of those that follow from the setting.
    """
    known = known_settings()[key]
    names = _names(key)
    arguments: dict[str, Any] = {"rich_help_panel": panel_of(key)}
    if known.kind == "bool":
        names = [f"{names[0]}/--no-{names[0][2:]}"]
    else:
        arguments["metavar"] = "SIZE" if known.is_size else _METAVARS.get(known.kind, "TEXT")
    return typer.Option(*names, help=sentence(known.help), **(arguments | changes))


def _names(key: str) -> list[str]:
    names = [flag_of(key)]
    if key in _SHORT:
        names.append(_SHORT[key])
    return names


def panel_of(key: str) -> str | None:
    """Return the group of --help that a setting is listed in; None for the command's own options.

    >>> panel_of("method.alpha"), panel_of("top_k"), panel_of("metrics_port")
    ('Reuse', 'Retrieval', None)
    """
    table = key.partition(".")[0]
    if table in ("reuse", "method", "remote"):
        return "Reuse" if table == "method" else table.capitalize()
    for panel, keys in _PANELS.items():
        if key in keys:
            return panel
    return None


def sentence(text: str) -> str:
    """Return a description as a sentence of --help, with a capital letter and a full stop.

    >>> sentence("chunks to retrieve")
    'Chunks to retrieve.'
    """
    return f"{text[:1].upper()}{text[1:]}." if text else ""


# Settings that commands without settings take, as plain parameters.
Model = Annotated[str, option_of("model")]
Dtype = Annotated[str, option_of("dtype")]
Threads = Annotated[int | None, option_of("threads", min=1, max=1024)]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one line of JSON, and nothing else, on stdout."),
]
ENGINE_KEYS = (
    "model",
    "store",
    "namespace",
    "system",
    "dtype",
    "device",
    "threads",
    "codec",
    "disk_bytes",
    "host_bytes",
    "max_variants",
    "variants_per_chunk",
    "remote.url",
    "remote.key_file",
)
ANSWER_KEYS = (
    "embeddings",
    "top_k",
    "reuse.recompute_ratio",
    "max_new_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
)


class ServerKeys(TypedDict):
    """Keys of a server, see `HTTPEngine.connect`."""

    api_key: str | None
    admin_key: str | None


def server_keys() -> ServerKeys:
    """Return the keys for a server of --server from the environment; None for a variable that is unset or empty.

    No option takes them: other users of the computer see command lines.
    """
    return {
        "api_key": os.environ.get(API_KEY_VARIABLE) or None,
        "admin_key": os.environ.get(ADMIN_KEY_VARIABLE) or None,
    }


def takes(
    *keys: str, defaults: Mapping[str, object] = MappingProxyType({}), **groups: type
) -> Callable[[Command], Command]:
    """Give a command settings, and the fields of dataclasses, as options.

    With `keys` the command gets the `Settings`, in which flags come first, as its parameter `settings`, and each
    dataclass as one object for the parameter named. With the key "threads" and a value for it, torch is limited to that
    many CPU threads before the command runs. An option has the name, type, default and help of its field, see
    `engine.settings.descriptions`; a field without a description has those of the setting of its name.

    Args:
        keys: keys of `known_settings`.
        defaults: defaults of this command, in place of those of the settings and fields.
        groups: dataclasses; a field may be annotated with a `typer.Option`.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        key_of = {key.replace(".", "_"): key for key in keys}
        fields_of = {
            name: [field.name for field in fields(group)] for name, group in groups.items()
        }

        parameters = {
            "context": inspect.Parameter("context", _KEYWORD_ONLY, annotation=typer.Context)
        }
        for parameter in signature.parameters.values():
            if parameter.name not in ("settings", "context", *groups):
                parameters[parameter.name] = parameter.replace(kind=_KEYWORD_ONLY)
        for name, key in key_of.items():
            parameters[name] = _parameter_of_setting(name, key, defaults.get(key))
        for group in groups.values():
            parameters |= _parameters_of_group(group, defaults)

        @wraps(command)
        def called(*, context: typer.Context, **given: Any) -> None:
            flags = {}
            for name, key in key_of.items():
                value = given.pop(name, None)
                if value not in (None, []):
                    flags[key] = value
            arguments = {
                name: value for name, value in given.items() if name in signature.parameters
            }
            for name, group in groups.items():
                arguments[name] = group(**{field: given[field] for field in fields_of[name]})
            if keys:
                settings = load_settings(context.obj, flags=flags, defaults=defaults)
                set_threads(settings["threads"] if "threads" in keys else None)
                arguments["settings"] = settings
            command(**arguments)

        del called.__wrapped__  # whose signature typer would take
        called.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(parameters.values())
        )
        called.__annotations__ = {
            name: parameter.annotation for name, parameter in parameters.items()
        }
        return called

    return decorate


def _parameter_of_setting(name: str, key: str, default: object) -> inspect.Parameter:
    """Return a setting as an option of text or a flag; without it, the other sources of the setting decide."""
    known = known_settings()[key]
    kind: Any = str | None
    if known.kind == "bool":
        kind = bool | None
    elif known.is_list:
        kind = list[str] | None
    default = known.default if default is None else default
    shown = False if default in (None, (), frozenset()) else str(default)
    option = option_of(key, show_default=shown)
    return inspect.Parameter(name, _KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _parameters_of_group(
    group: type, defaults: Mapping[str, object]
) -> dict[str, inspect.Parameter]:
    """Return the fields of a dataclass as options."""
    hints = get_type_hints(group, include_extras=True)
    texts: dict[str, str] = {}
    for base in reversed(group.__mro__):
        texts |= descriptions(base)

    parameters = {}
    for field in fields(group):
        name = field.name
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        annotation = hints[name]
        if not hasattr(annotation, "__metadata__"):
            metavar = _METAVARS.get(str(field.type).removesuffix(" | None"))
            if name in texts:
                option = typer.Option(*_names(name), help=sentence(texts[name]), metavar=metavar)
            else:
                option = option_of(name, metavar=metavar)
            annotation = Annotated[annotation, option]
        default = defaults.get(name, default)
        parameters[name] = inspect.Parameter(
            name, _KEYWORD_ONLY, default=default, annotation=annotation
        )
    return parameters


def where_of(conditions: list[str] | None) -> Callable[[Metadata], bool] | None:
    """Return the filter of --where, a function from a chunk's metadata to a bool; None without conditions.

    Conditions on one name are alternatives, those on different names must all hold; a chunk without the name does not
    match. Values are compared as text, capital and small letters as different ones, and `*` stands for any text.
    ConfigError for a condition that is not NAME=VALUE.

    >>> allowed = where_of(["source=docs/*", "page=2", "page=3"])
    >>> allowed({"source": "docs/a.pdf", "page": 3}), allowed({"source": "docs/a.pdf", "page": 1}), allowed({})
    (True, False, False)
    """
    if not conditions:
        return None
    patterns: dict[str, list[re.Pattern[str]]] = {}
    for condition in conditions:
        name, sign, value = condition.partition("=")
        if not sign or not name.strip():
            raise ConfigError(
                f"--where is {condition!r}; write NAME=VALUE, for example source=docs/kettle.md"
            )
        # Only * is special: names of files may hold the [ and ? of globs.
        pattern = ".*".join(map(re.escape, composed(value.strip()).split("*")))
        patterns.setdefault(name.strip(), []).append(re.compile(pattern, re.DOTALL))

    def allowed(metadata: Metadata) -> bool:
        return all(
            name in metadata
            and any(pattern.fullmatch(composed(str(metadata[name]))) for pattern in choices)
            for name, choices in patterns.items()
        )

    return allowed


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = False
) -> None:
    """Print a table to stdout; with `numbers` all columns but the first are set to the right."""
    table = Table(box=None, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", justify="right" if numbers and place else "left")
    for row in rows:
        table.add_row(*map(str, row))
    out.print(table)


def print_json(value: object) -> None:
    """Print a value to stdout as one line of JSON; NaN and infinities become null, other types their `str`."""
    typer.echo(as_json(value))


def warn(text: str) -> None:
    """Print a warning to stderr."""
    err.print(text, style="yellow", soft_wrap=True)


def set_threads(threads: int | None) -> None:
    """Limit torch to this number of CPU threads; None leaves it as it is. Raises RuntimeError for a number below 1."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def quiet_libraries() -> None:
    """Switch off progress bars of huggingface_hub and transformers, and warnings of transformers and pypdf.

    For this process. Warnings of huggingface_hub stay: without them a hub that is asked again seems to hang.
    """
    import transformers.utils.logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show a spinner with a text on stderr in the block, for work without steps; nothing without a terminal."""
    with err.status(Text(text)):
        yield


@contextmanager
def progress_bar(text: str, *, remaining: bool = False) -> Iterator[Callable[[Progress], None]]:
    """Show a progress bar on stderr while the block runs, or lines now and then (`ProgressLines`) without a terminal.

    The block gets a function that shows a `Progress`. `remaining` also shows the time left.
    """
    if not err.is_terminal:
        yield ProgressLines(text, remaining=remaining)
        return
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


class ProgressLines:
    """Progress as lines on stderr: the first step, one every `PROGRESS_S` seconds, and the last.

    A step whose text begins with "expected" always gets a line.
    """

    def __init__(self, text: str, *, remaining: bool) -> None:
        self._text = text
        self._remaining = remaining
        self._began = time.monotonic()
        self._shown = self._began
        self._first: Progress | None = None

    def __call__(self, step: Progress) -> None:
        """Print the step if it is due; else do nothing."""
        now = time.monotonic()
        first = self._first
        is_last = first is not None and step.done >= step.total > first.done
        is_due = is_last or step.what.startswith("expected")
        if first is not None and not is_due and now < self._shown + PROGRESS_S:
            return
        self._shown = now
        self._first = first or step
        line = f"{self._text}: {step.done:,} of {step.total:,}, {timedelta(seconds=round(now - self._began))}"
        steps = step.done - self._first.done
        if self._remaining and steps > 0 and step.done < step.total:
            left = (now - self._began) / steps * (step.total - step.done)
            line += f", about {timedelta(seconds=round(left))} left"
        err.print(f"{line} ({step.what})" if step.what else line, soft_wrap=True)


def numbers(text: str) -> list[float]:
    """Return the numbers of a comma-separated list, in order. Raises ConfigError also for NaN and infinities.

    >>> numbers("0.5,1,2")
    [0.5, 1.0, 2.0]
    """
    try:
        values = [float(value) for value in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(map(math.isfinite, values)):
        raise ConfigError(f"{text!r} is not a list of numbers; write for example 0.5,1,2")
    return values


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, in the singular for 1.

    >>> counted(1, "document"), counted(2, "document"), counted(1200, "chunk-cache")
    ('1 document', '2 documents', '1,200 chunk-caches')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def megabytes(nbytes: float) -> str:
    """Return a number of bytes as text: in MB (10⁶ bytes), from 10,000 MB on in GB.

    >>> megabytes(1_500_000), megabytes(21_474_836_480)
    ('1.5 MB', '21.5 GB')
    """
    return f"{nbytes / 1e6:.1f} MB" if nbytes < 1e10 else f"{nbytes / 1e9:.1f} GB"
