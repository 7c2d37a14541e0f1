"""Parts that the commands share: single options, progress bars, output of results and errors."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import wraps
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import typer
from rich import progress as bars
from rich.table import Table
from rich.text import Text

from cachecraft_rag.cli.console import as_json, err, out
from cachecraft_rag.engine.settings import descriptions, flag_of, known_settings, load_settings
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types import Metadata, Progress

PROGRESS_S = 10.0  # between two lines of progress without a terminal
_SHORT = {"store": "-s", "model": "-m", "top_k": "-k", "max_new_tokens": "--max-tokens", "tensor_parallel_size": "-tp"}
_SHORT |= {"data": "-d", "out": "-o", "quality": "-q"}
# An empty name for a flag, because typer would write "<bool>" after it.
_METAVARS = {"int": "INTEGER", "float": "FLOAT", "Path": "PATH", "str": "TEXT", "list[str]": "TEXT", "bool": ""}
_PANELS: Mapping[str, tuple[str, ...]] = {
    "Model": ("model", "dtype", "device", "threads"),
    "Store": ("store", "namespace", "codec", "disk_bytes", "host_bytes", "max_variants", "variants_per_chunk"),
    "Retrieval": ("embeddings", "top_k"),
    "Answer": ("system", "max_new_tokens", "temperature", "top_p", "seed", "stop"),
}


def option_of(key: str, **changes: Any) -> Any:
    """Return the option of a setting, as its dataclass describes it.

    Args:
        changes: arguments of `typer.Option` in place of those that follow from the setting.
    """
    known = known_settings()[key]
    names = _names(key)
    if known.kind == "bool":
        names = [f"{names[0]}/--no-{names[0][2:]}"]
    arguments: dict[str, Any] = {
        "metavar": "SIZE" if known.is_size else _METAVARS.get(known.kind, "TEXT"),
        "rich_help_panel": panel_of(key),
    }
    return typer.Option(*names, help=sentence(known.help), **(arguments | changes))


def _names(key: str) -> list[str]:
    names = [flag_of(key)]
    if key in _SHORT:
        names.append(_SHORT[key])
    return names


def panel_of(key: str) -> str | None:
    """Return the group of --help that a setting is listed in; None for the command's own options.

    >>> panel_of("reuse.alpha"), panel_of("top_k"), panel_of("metrics_port")
    ('Reuse', 'Retrieval', None)
    """
    table = key.partition(".")[0]
    if table in ("reuse", "remote"):
        return table.capitalize()
    for panel, keys in _PANELS.items():
        if key in keys:
            return panel
    return None


def sentence(text: str) -> str:
    """A description as a sentence of --help.

    >>> sentence("chunks to retrieve")
    'Chunks to retrieve.'
    """
    return f"{text[:1].upper()}{text[1:]}." if text else ""


# Settings that commands without settings take, as plain parameters.
Model = Annotated[str, option_of("model")]
Dtype = Annotated[str, option_of("dtype")]
Threads = Annotated[int | None, option_of("threads", min=1, max=1024)]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print one line of JSON, and nothing else, on stdout.")]
ENGINE_KEYS = (
    "model", "store", "namespace", "system", "dtype", "device", "threads", "codec", "disk_bytes", "host_bytes",
    "max_variants", "variants_per_chunk", "remote.url", "remote.key_file",
)  # fmt: skip
ANSWER_KEYS = (
    "embeddings", "top_k", "reuse.recompute_ratio", "max_new_tokens", "temperature", "top_p", "seed", "stop",
)  # fmt: skip


def takes(*keys: str, defaults: Mapping[str, Any] = MappingProxyType({}), **groups: type) -> Callable[..., Any]:
    """Give a command settings, and the fields of dataclasses, as options.

    The command gets the `Settings`, flags first, as its parameter `settings`, and each dataclass as one object for the
    parameter named. An option has the name, type, default and help of its field, see `engine.settings.descriptions`;
    a field without a description is the setting of that name.

    Args:
        keys: of `known_settings`.
        defaults: of this command, in place of the settings' and the fields' own.
        groups: dataclasses, whose fields may be annotated with options of their own.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        left_out = {"settings", "context", *groups}
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = {"context": inspect.Parameter("context", kind, annotation=typer.Context)}
        parameters |= {one.name: one.replace(kind=kind) for one in own.parameters.values() if one.name not in left_out}
        names = {key.replace(".", "_"): key for key in keys}
        parameters |= {name: _parameter_of_setting(name, key, defaults.get(key)) for name, key in names.items()}
        fields_of = {name: [one.name for one in fields(group)] for name, group in groups.items()}
        for group in groups.values():
            parameters |= _parameters_of_group(group, defaults)

        @wraps(command)
        def called(*, context: typer.Context, **given: Any) -> None:
            flags = {key: value for name, key in names.items() if (value := given.pop(name, None)) not in (None, [])}
            chosen = {name: group(**{one: given[one] for one in fields_of[name]}) for name, group in groups.items()}
            given = {name: value for name, value in given.items() if name in own.parameters} | chosen
            if keys:
                given["settings"] = load_settings(context.obj, flags=flags, defaults=defaults)
                set_threads(given["settings"]["threads"] if "threads" in keys else None)
            command(**given)

        del called.__wrapped__  # whose signature typer would take
        called.__signature__ = own.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
        called.__annotations__ = {name: one.annotation for name, one in parameters.items()}
        return called

    return decorate


def _parameter_of_setting(name: str, key: str, default: Any) -> inspect.Parameter:
    """Text, or a flag, whose absence leaves the other sources of a setting."""
    known = known_settings()[key]
    kind: Any = bool | None if known.kind == "bool" else list[str] | None if known.is_list else str | None
    default = known.default if default is None else default
    shown = False if default in (None, (), frozenset()) else str(default)
    option = option_of(key, show_default=shown)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _parameters_of_group(group: type, defaults: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
    """The fields of a dataclass as options."""
    hints = get_type_hints(group, include_extras=True)
    texts = {name: text for kind in reversed(group.__mro__) for name, text in descriptions(kind).items()}
    found = {}
    for one in fields(group):
        kind, default = hints[one.name], inspect.Parameter.empty if one.default is MISSING else one.default
        if one.default_factory is not MISSING:
            default = one.default_factory()
        if not hasattr(kind, "__metadata__"):
            metavar = _METAVARS.get(str(one.type).removesuffix(" | None"))
            described = typer.Option(*_names(one.name), help=sentence(texts.get(one.name, "")), metavar=metavar)
            kind = Annotated[kind, described if one.name in texts else option_of(one.name, metavar=metavar)]
        default = defaults.get(one.name, default)
        found[one.name] = inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
    return found


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


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = False) -> None:
    """A table on stdout; with `numbers` all columns but the first are set to the right."""
    table = Table(box=None, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", justify="right" if numbers and place else "left")
    for row in rows:
        table.add_row(*map(str, row))
    out.print(table)


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    typer.echo(as_json(value))


def warn(text: str) -> None:
    """A warning on stderr."""
    err.print(text, style="yellow", soft_wrap=True)


def set_threads(threads: int | None) -> None:
    """Limit torch to this number of CPU threads."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def quiet_libraries() -> None:
    """Switch off the progress bars and warnings of libraries; the commands show their own."""
    import transformers.utils.logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """A spinner on stderr, for work without steps."""
    with err.status(Text(text)):
        yield


@contextmanager
def progress_bar(text: str, *, remaining: bool = False) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on stderr that shows each `Progress` it is called with; without a terminal, lines now and then.

    `remaining` also shows the time left, for work whose steps take about equally long.
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
    """Progress as lines on stderr: the first step, one every `PROGRESS_S` seconds, and the last."""

    def __init__(self, text: str, *, remaining: bool) -> None:
        self._text, self._remaining = text, remaining
        self._began = self._shown = time.monotonic()
        self._first: Progress | None = None

    def __call__(self, step: Progress) -> None:
        """Show the step if it is due."""
        now, first = time.monotonic(), self._first
        due = step.what.startswith("expected") or (first is not None and step.done >= step.total > first.done)
        if first is not None and not due and now < self._shown + PROGRESS_S:
            return
        self._shown, self._first = now, first or step
        line = f"{self._text}: {step.done:,} of {step.total:,}, {timedelta(seconds=round(now - self._began))}"
        steps = step.done - self._first.done
        if self._remaining and steps > 0 and step.done < step.total:
            left = (now - self._began) / steps * (step.total - step.done)
            line += f", about {timedelta(seconds=round(left))} left"
        err.print(f"{line} ({step.what})" if step.what else line, soft_wrap=True)


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


def megabytes(nbytes: float) -> str:
    """Bytes for people: as MB, from 10,000 MB on as GB.

    >>> megabytes(1_500_000), megabytes(21_474_836_480)
    ('1.5 MB', '21.5 GB')
    """
    return f"{nbytes / 1e6:.1f} MB" if nbytes < 1e10 else f"{nbytes / 1e9:.1f} GB"
