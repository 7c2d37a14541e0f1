"""Settings of a remote: its place, its keys, and time limits."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

from cachecraft_rag.checks import (
    MOST_SECONDS,
    check_kind,
    check_number,
    check_path,
    check_text,
    check_whole,
    refuses_other_names,
)
from cachecraft_rag.errors import ConfigError

REDIS_SCHEMES = frozenset({"redis", "rediss", "unix"})
OBJECT_SCHEMES = frozenset({"s3", "gs", "az", "file", "memory"})
_EXAMPLES = "redis://host:6379/0, rediss://…, unix:///path, s3://bucket/prefix, gs://…, az://…, file:///shared/folder"


KEY_VARIABLE = "CACHECRAFT_REMOTE_KEY"
KEY_FILE_VARIABLE = "CACHECRAFT_REMOTE_KEY_FILE"
SHORTEST_KEY = 16
_MAKE_KEY = "make one with `openssl rand -hex 32`"
_FILE_BYTES = 1 << 16
_HIDDEN = "(its text is left out: it may hold a part of the URL)"
_SECRET_LETTERS = 3  # shorter pieces of a URL occur in any text, and are not secret
_PART = 5
# After the scheme: user and password, host and port, path; then what may hold more secrets. No @ but the one.
_PARTS = re.compile(
    r"//((?P<user>[^/?#@]*)@)?(?P<place>[\w.\-\[\]]*(:[0-9]{1,5})?)(?P<path>(/[\w.,+~%\-]*)*)(?P<rest>([?#][^@]*)?)",
    re.DOTALL | re.ASCII,
)


def shown_url(url: str) -> str:
    """Return a URL for messages and logs: "***@" for user and password, and "?***" for all that follows ? or #.

    Host, port and path are kept. A URL that cannot be divided safely is "scheme:***", and one of an unknown scheme
    (also one in capitals) is "***": after a typo, a password may be anywhere, also after an @ that begins it.

    >>> shown_url("redis://me:sec'ret@host:6379/0?password=secret")
    'redis://***@host:6379/0?***'
    >>> shown_url("redis:/:secret@host"), shown_url("redis://:sec/ret@host"), shown_url("host:secret")
    ('redis:***', 'redis:***', '***')
    """
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in REDIS_SCHEMES | OBJECT_SCHEMES:
        return "***"
    parts = _PARTS.fullmatch(rest)
    is_open = parts is not None and (parts["user"] or "").endswith(":")
    if (
        parts is None
        or is_open
        or (scheme in REDIS_SCHEMES - {"unix"} and not re.fullmatch(r"(/[0-9]*)?", parts["path"]))
    ):
        return f"{scheme}:***"
    user = "***@" if parts["user"] else ""
    query = "?***" if parts["rest"] else ""
    return f"{scheme}://{user}{parts['place']}{parts['path']}{query}"


def hidden(text: str, url: str) -> str:
    """Return a library's message about this URL without its secrets, or a note if it may hold parts of them.

    The URL in the text is replaced by `shown_url`. If the text then holds five characters in a row of a word of the URL
    that is not shown, or such a word of three or four, all of the text is replaced by the note.

    >>> hidden("cannot reach redis://me:secret@host:6379/0 (refused)", "redis://me:secret@host:6379/0")
    'cannot reach redis://***@host:6379/0 (refused)'
    >>> hidden("wrong password: 'sec/ret'", "redis://me:sec%2Fret@host")
    '(its text is left out: it may hold a part of the URL)'
    """
    shown = shown_url(url)
    text = text.replace(url, shown)
    for form in (url, unquote(url), quote(url)):
        for piece in (*re.findall(r"\w+", form), *re.findall(r"[^:/@?#&=]+", form)):
            # Parts of pieces too: a library may cut a URL anywhere.
            parts = {piece[at : at + _PART] for at in range(max(1, len(piece) - _PART + 1))}
            if any(
                len(part) >= _SECRET_LETTERS and part not in shown and part in text
                for part in parts
            ):
                return _HIDDEN
    return text


@refuses_other_names(what="setting of the remote's tuning")
@dataclass(frozen=True, slots=True)
class RemoteTuning:
    """Tuned settings of a remote. Change them after a measurement, or for a distant network.

    variants_per_chunk  most variants of one chunk on the remote; the oldest are removed first
    ask_below           the remote is asked for chunks with fewer variants than this in the local store; with 1, an
                        engine that has a variant of every chunk never waits for the remote
    lookup_timeout_s    longest wait for the rows of a request in seconds; None: 0.1 s for Redis, 0.5 s for object
                        stores, whose look-up takes two round trips
    connect_timeout_s   longest wait for a connection, in seconds
    read_timeout_s      longest wait for the next piece (1 MiB) of a running transfer, in seconds
    put_timeout_s       longest upload of one chunk-cache, in seconds
    close_timeout_s     longest wait of `close` for queued chunk-caches, in seconds
    queue_bytes         most bytes of chunk-caches that wait to be sent; further ones are dropped
    failures            failures of one kind in a row (time-outs or errors) after which the remote is not asked
    cool_down_s         seconds until it is tried again in the background; doubles after each failed try, to 16 times
    """

    variants_per_chunk: int = 8
    ask_below: int = 1
    lookup_timeout_s: float | None = None
    connect_timeout_s: float = 0.5
    read_timeout_s: float = 0.5
    put_timeout_s: float = 30.0
    close_timeout_s: float = 5.0
    queue_bytes: int = 256 << 20
    failures: int = 3
    cool_down_s: float = 5.0

    def __post_init__(self) -> None:
        """Check every field."""
        for setting in fields(self):
            name = setting.name
            value = getattr(self, name)
            if name.endswith("_s"):
                check_number(
                    name, value, above=True, most=MOST_SECONDS, optional=name == "lookup_timeout_s"
                )
            else:
                check_whole(name, value, least=1)


_IN_TUNING = MappingProxyType(
    {setting.name: f"tuning=RemoteTuning({setting.name}=…)" for setting in fields(RemoteTuning)}
)


@refuses_other_names(what="setting of a remote", hints=_IN_TUNING)
@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """Settings of a remote.

    url                 shares chunk-caches with other engines through redis://, rediss:// or unix:// (Redis, Valkey),
                        s3://, gs://, az:// or file:// (object stores); memory:// is for tests, with contents of one
                        engine only. Credentials are in it or in the environment, as the libraries know them
    budget_bytes        most bytes in a folder (file://), by default 20 GiB; the least recently read chunk-caches are
                        removed first. memory:// has no limit and ignores it. Redis is limited by its `maxmemory`, a
                        bucket by its life-cycle rules
    key                 secret that all engines share: chunk-caches are signed with it, and unsigned ones are not used.
                        By default the key of `key_file`, or of the environment (CACHECRAFT_REMOTE_KEY,
                        CACHECRAFT_REMOTE_KEY_FILE); without a key, chunk-caches are neither signed nor verified
    key_file            file with one key per line, shared by all engines: the first one signs, all are accepted
    tuning              time limits, circuit breaker and queue: a `RemoteTuning`

    The keys are checked when they are used, see `keys`.
    """

    url: str = field(repr=False)
    budget_bytes: int | None = None
    key: str | None = field(default=None, repr=False)
    key_file: str | os.PathLike[str] | None = None
    tuning: RemoteTuning = field(default_factory=RemoteTuning)

    def __post_init__(self) -> None:
        """Check URL and ranges; raises ConfigError."""
        check_text("url", self.url)
        check_whole("budget_bytes", self.budget_bytes, least=1, optional=True)
        check_kind(
            "tuning",
            self.tuning,
            RemoteTuning,
            advice="write RemoteTuning(read_timeout_s=…), or use with_tuning",
        )
        # not shown, because it may be the secret
        if self.key is not None and not isinstance(self.key, str):
            raise ConfigError(f"key must be text, not {type(self.key).__name__}: {_MAKE_KEY}")
        if self.key_file is not None:
            check_path("key_file", self.key_file)
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in REDIS_SCHEMES | OBJECT_SCHEMES
            place = parts.path if parts.scheme in ("unix", "file") else parts.netloc
            # raises ValueError for an invalid port
            _ = parts.port if parts.scheme in REDIS_SCHEMES else None
        except ValueError:
            known = False
        if not known:
            raise ConfigError(
                f"{self.shown!r} is not the URL of a remote; write one such as {_EXAMPLES}"
            )
        if not place and parts.scheme != "memory":
            raise ConfigError(
                f"{self.shown!r} names no host, bucket or path; give a URL such as {_EXAMPLES}"
            )
        if self.budget_bytes is not None and parts.scheme not in ("file", "memory"):
            own = (
                "`maxmemory` of the server"
                if parts.scheme in REDIS_SCHEMES
                else "life-cycle rules of the bucket"
            )
            raise ConfigError(
                f"budget_bytes is for folders (file://) only; set {own} instead: docs/guides/remotes.md"
            )

    def with_tuning(self, **changes: Any) -> Self:
        """Return a copy with these fields of its tuning changed.

        >>> RemoteConfig("memory://").with_tuning(ask_below=2).tuning.ask_below
        2
        """
        return replace(self, tuning=replace(self.tuning, **changes))

    @property
    def scheme(self) -> str:
        """Scheme of the URL in lower case, such as "redis"; one of `REDIS_SCHEMES` or `OBJECT_SCHEMES`."""
        return urlsplit(self.url).scheme

    @property
    def shown(self) -> str:
        """URL for messages and logs, without its secrets, see `shown_url`."""
        return shown_url(self.url)

    def hide(self, error: object) -> str:
        """Return a library's message without the secrets of the URL, see `hidden`."""
        return hidden(str(error), self.url)

    def keys(self) -> tuple[bytes, ...]:
        """Return the accepted keys, stripped and in UTF-8; the first one signs. `()` if the remote is not signed.

        Precedence: `key`, `key_file`, CACHECRAFT_REMOTE_KEY, CACHECRAFT_REMOTE_KEY_FILE; only the first one that is
        set is used. A file is read at each call; each line that is not blank is a key. Raises ConfigError for an empty
        variable, for a key of fewer than 16 characters or with some that cannot be printed, and as `keys_in`.
        """
        key = self.key
        path = self.key_file
        if key is None and path is None:
            key = os.environ.get(KEY_VARIABLE)
            path = os.environ.get(KEY_FILE_VARIABLE)
        if (path if key is None else key) == "":
            raise ConfigError(
                f"the remote's key is empty: leave it out (or unset its variable) to sign nothing, or {_MAKE_KEY}"
            )
        keys = [key.strip()] if key is not None else keys_in(Path(path)) if path is not None else []
        if not all(
            len(signing_key) >= SHORTEST_KEY and signing_key.isprintable() for signing_key in keys
        ):
            raise ConfigError(
                f"a key of a remote needs at least {SHORTEST_KEY} characters that can be printed; {_MAKE_KEY}"
            )
        return tuple(signing_key.encode() for signing_key in keys)

    @property
    def lookup_limit_s(self) -> float:
        """Longest wait of a look-up in seconds: `lookup_timeout_s`; without one 0.1 for Redis and 0.5 otherwise."""
        return self.tuning.lookup_timeout_s or (0.1 if self.scheme in REDIS_SCHEMES else 0.5)


def keys_in(path: Path) -> list[str]:
    """Return the keys in a file, one per line, without white space around them; they are not checked.

    Raises ConfigError if the file cannot be read, has more than 65,536 bytes, is not UTF-8, or holds no key.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES + 1)
        is_too_long = len(data) > _FILE_BYTES
        # the last character may be cut off
        text = data.decode("utf-8-sig", errors="ignore" if is_too_long else "strict")
    except (OSError, ValueError) as error:
        why = (
            f"cannot be read ({error.strerror if isinstance(error, OSError) else 'it is no text'})"
        )
    else:
        keys = [line.strip() for line in text.splitlines() if line.strip()]
        if keys and not is_too_long:
            return keys
        why = "holds no key" if not keys else "is no file of keys: it is too long"
    raise ConfigError(f"the key file {path} {why}; write a key of `openssl rand -hex 32` into it")
