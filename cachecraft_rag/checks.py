"""Checks of arguments and settings: each raises a ConfigError with the name, the rule and the wrong value.

Numbers exclude bools, NaN, and integers over 63 bits, which SQLite and torch cannot store. Text must be valid Unicode:
half a surrogate pair, the result of decoding an argument wrongly, is rejected.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import TypeVar

from cachecraft_rag.errors import ConfigError, MissingPackageError

T = TypeVar("T")
MOST = 2**63 - 1
MOST_SECONDS = 1e6  # eleven days; some waits count in 32-bit milliseconds
FINITE = math.nextafter(math.inf, 0.0)
_SHOWN = 120  # characters of a wrong value in a message


def shown(value: object) -> str:
    """Return a short and printable form of a wrong value, for a message: at most 120 characters and an ellipsis.

    That is its `repr`, with characters escaped that cannot be printed.

    >>> shown("2GB"), shown(10**5000)
    ("'2GB'", 'a number of 16610 bits')
    """
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        # Python refuses to write very long ones out
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    beginning = text[: _SHOWN + 1]  # the text may have millions of characters
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in beginning)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _wrong(name: str, must: str, value: object, advice: str = "") -> ConfigError:
    return ConfigError(
        f"{name} must be {must}, not {shown(value)}" + (f": {advice}" if advice else "")
    )


def check_whole(
    name: str, value: object, *, least: int = 0, most: int = MOST, optional: bool = False
) -> None:
    """Require a whole number from `least` to `most` (True and 1.0 are none), or None if `optional`."""
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        upper = f"at most {most}" if most != MOST else "below 2**63"
        raise ConfigError(
            f"{name} is {shown(value)}; it must be a whole number, at least {least} and {upper}"
        )


def check_number(
    name: str,
    value: object,
    *,
    least: float = 0.0,
    most: float = math.inf,
    above: bool = False,
    optional: bool = False,
) -> None:
    """Require a number from `least` to `most` (`above` excludes `least`), or None if `optional`.

    Infinity is allowed unless `most` excludes it, such as FINITE.
    """
    if optional and value is None:
        return
    number = isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST
    )
    if number and (value > least if above else value >= least) and value <= most:  # type: ignore[operator]
        return
    lower = f"above {least:g}" if above else f"{least:g} or more"
    upper = "" if most == math.inf else f" and at most {most:g}" if most < 1e300 else " and finite"
    raise ConfigError(f"{name} is {shown(value)}; it must be a number, {lower}{upper}")


def check_flag(name: str, value: object, *, advice: str = "") -> None:
    """Require True or False. Raises ConfigError for anything else; `advice` is the end of its message."""
    if not isinstance(value, bool):
        raise _wrong(name, "True or False", value, advice)


def check_text(
    name: str, value: object, *, optional: bool = False, empty: bool = True, damaged: bool = False
) -> None:
    """Require text, or None if `optional`; `damaged` allows half surrogate pairs, which a model reads as "?".

    `empty=False` refuses ""; text of white space alone does not count as empty.
    """
    if optional and value is None:
        return
    if not isinstance(value, str):
        advice = "decode it first" if isinstance(value, bytes) else ""
        raise _wrong(name, "text", value, advice)
    if not empty and not value:
        raise _wrong(name, "text with something in it", value)
    try:
        value.encode(errors="surrogatepass" if damaged else "strict")
    except UnicodeEncodeError:
        raise _wrong(name, "text that is valid Unicode", value) from None


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Require one of `choices`, which are one or more. Raises ConfigError for anything else; the message lists them."""
    if not isinstance(value, str) or value not in choices:
        *others, last = choices
        listed_choices = f"{', '.join(others)} or {last}" if others else last
        raise _wrong(name, listed_choices, value)


def check_kind(
    name: str,
    value: object,
    kinds: type | tuple[type, ...],
    *,
    advice: str = "",
    optional: bool = False,
) -> None:
    """Require an object of one of these classes, or None if `optional`; `advice` says how to make one."""
    if (optional and value is None) or isinstance(value, kinds):
        return
    names = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
    raise _wrong(name, f"a {names}", value, advice)


def check_path(name: str, value: object) -> None:
    """Require a path as text or a path object, not "", and not bytes, whose encoding is unknown. It need not exist."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise _wrong(name, "a path", value)
    try:
        whole = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        whole = False
    if not path or not whole:
        raise _wrong(name, "a path without a NUL and of valid letters", value)


def check_names(
    given: Iterable[str],
    known: Collection[str],
    *,
    what: str = "option",
    advice: str = "",
    hints: Mapping[str, str] = MappingProxyType({}),
    prefix: str = "",
) -> None:
    """Raise ConfigError if a given name is not known. It suggests the nearest known name for each.

    It lists all known names if there is no suggestion for one of them. `hints` are names that are often tried → the
    suggestion for each. `prefix` is the beginning of all names, which makes no name similar to another. `advice` is the
    end of the message.

    >>> check_names(["sedd"], ["seed", "stop"])
    Traceback (most recent call last):
    cachecraft_rag.errors.ConfigError: sedd: no such option. Did you mean seed?
    >>> check_names(["size"], ["seed", "stop"])
    Traceback (most recent call last):
    cachecraft_rag.errors.ConfigError: size: no such option; there are seed, stop.
    """
    unknown = sorted(str(name) for name in given if name not in known)
    if not unknown:
        return
    near = [hints.get(name, "") or _nearest(name, known, prefix) for name in unknown]
    suggested = ", ".join(dict.fromkeys(filter(None, near)))
    known_names = ", ".join(sorted(known)) or "none"
    message = f"{', '.join(unknown)}: no such {what}"
    message += f". Did you mean {suggested}?" if suggested else f"; there are {known_names}."
    if suggested and not all(near):
        message += f" There are {known_names}."
    raise ConfigError(f"{message} {advice}".rstrip())


def _nearest(name: str, known: Collection[str], prefix: str) -> str:
    """Return the known name that is most similar to this one; "" if none is similar.

    Of "tuning.readers" the last part has to be similar: all names of a table begin alike.

    >>> _nearest("tuning.reader", ["readers_of", "tuning.readers"], ""), _nearest("a.x", ["a.size"], "")
    ('tuning.readers', '')
    """

    def last_part(name: str) -> str:
        return name.removeprefix(prefix).rpartition(".")[2]

    parts = get_close_matches(
        last_part(name), {last_part(other) for other in known}, n=max(1, len(known))
    )
    similar = [other for other in known if last_part(other) in parts]
    return "".join(get_close_matches(name, similar, n=1, cutoff=0.0))


def refuses_other_names(
    *, what: str = "option", hints: Mapping[str, str] = MappingProxyType({})
) -> Callable[[type[T]], type[T]]:
    """Make a dataclass raise the ConfigError of `check_names` for unknown arguments, instead of a TypeError.

    `what` and `hints` are as there. `dataclasses.replace` and all methods over it raise it too.
    """

    def decorate(config: type[T]) -> type[T]:
        names = tuple(setting.name for setting in fields(config))  # type: ignore[arg-type]
        signature = inspect.signature(config)

        def new(cls: type[T], /, *_: object, **named: object) -> T:
            check_names(named, names, what=what, hints=hints)
            return object.__new__(cls)

        config.__new__ = new  # type: ignore[assignment]
        config.__signature__ = signature  # type: ignore[attr-defined]
        return config

    return decorate


def check_callable(name: str, value: object, *, optional: bool = True) -> None:
    """Require a function or another callable, or None if `optional`. Raises ConfigError for anything else."""
    if not (optional and value is None) and not callable(value):
        raise _wrong(name, "a function", value)


@contextmanager
def config_errors() -> Iterator[None]:
    """Raise ConfigError in place of each ValueError of the block, with its text; a ConfigError and other errors pass.

    For errors of a framework about a setting: pydantic's ValidationError is a ValueError.
    """
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def from_extra(extra: str, purpose: str) -> Iterator[None]:
    """Import packages in the block: if one cannot be imported, MissingPackageError says what to install.

    Args:
        extra: the extra that brings the packages; "": this package itself.
        purpose: the part that needs them, the first words of the message.
    """
    try:
        yield
    except MissingPackageError:
        raise
    except ImportError as error:
        raise missing_package(extra, purpose, str(error)) from error


def missing_package(extra: str, purpose: str, reason: str) -> MissingPackageError:
    """Return the error for a package of an extra that cannot be imported, for this reason.

    >>> print(missing_package("retrieval", "The index", "No module named 'faiss'"))
    The index needs a package that is missing (No module named 'faiss'); type: pip install 'cachecraft-rag[retrieval]'
    """
    install = f"'cachecraft-rag[{extra}]'" if extra else "cachecraft-rag"
    return MissingPackageError(
        f"{purpose} needs a package that is missing ({reason}); type: pip install {install}"
    )


def check_mapping(name: str, value: object) -> None:
    """Require a mapping with text keys. Raises ConfigError for anything else."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, "a mapping from names to values", value)


def listed(name: str, given: Iterable[T]) -> list[T]:
    """Return a list of the items, because a generator yields them only once; a single text or bytes are refused."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        raise _wrong(name, "a list", given, "put a single one into a list")
    return list(given)
