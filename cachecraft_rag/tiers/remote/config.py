"""Where a remote is, how much it may hold, and how long anybody waits for it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from cachecraft_rag.checks import MOST_SECONDS, check_number, check_text, check_whole
from cachecraft_rag.errors import ConfigError

REDIS_SCHEMES = frozenset({"redis", "rediss", "unix"})
OBJECT_SCHEMES = frozenset({"s3", "gs", "az", "file", "memory"})
_EXAMPLES = "redis://host:6379/0, rediss://…, unix:///path, s3://bucket/prefix, gs://…, az://…, file:///shared/folder"


def redact(text: str) -> str:
    """The text without passwords and signatures: what stands before an @ or behind a ? in any URL of it.

    >>> redact("cannot reach redis://me:secret@host:6379/0?password=secret (refused)")
    'cannot reach redis://***@host:6379/0?*** (refused)'
    """
    text = re.sub(r"(\w+://)[^\s'\"]*@", r"\1***@", text)  # greedy: a password may hold an @ or a /
    return re.sub(r"(\w+://[^\s?'\"]*)\?[^\s'\")]+", r"\1?***", text)


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """Settings of a remote.

    url                 redis://, rediss:// or unix:// (Redis, Valkey), s3://, gs://, az:// or file:// (object stores;
                        memory:// within one process). Credentials are in it or in the environment, as the libraries
                        know them
    budget_bytes        all chunk-caches there together; where engines differ, the smallest budget wins
    variants_per_chunk  the least worthy of a chunk give way beyond so many
    ask_below           a chunk with fewer variants than this in the local store is asked for; at 1 an engine that has
                        all it needs never waits for the remote
    lookup_timeout_s    longest wait for the rows of a request; None = 0.1 s for Redis, 0.5 s for object stores, whose
                        look-up takes two round trips
    connect_timeout_s   longest wait for a connection
    read_timeout_s      longest wait for the next piece (1 MiB) of a transfer that is under way
    put_timeout_s       longest upload of one chunk-cache
    close_timeout_s     how long `close` waits for what is still to be sent
    queue_bytes         chunk-caches waiting to be sent; what comes while it is full is dropped
    failures            so many time-outs or errors of a kind in a row, and the remote is left alone
    cool_down_s         … for so long; then one try in the background, with twice the pause after each that fails
    """

    url: str = field(repr=False)
    budget_bytes: int = 20 << 30
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
        """Check URL and ranges; raises ConfigError."""
        check_text("url", self.url)
        for setting in fields(self)[1:]:
            name, value = setting.name, getattr(self, setting.name)
            if name.endswith("_s"):
                check_number(name, value, above=True, most=MOST_SECONDS, optional=name == "lookup_timeout_s")
            else:
                check_whole(name, value, least=1)
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in REDIS_SCHEMES | OBJECT_SCHEMES
            place = parts.path if parts.scheme in ("unix", "file") else parts.netloc
            _ = parts.port if parts.scheme in REDIS_SCHEMES else None  # raises ValueError for what is no number
        except ValueError:
            known = False
        if not known:
            raise ConfigError(f"{redact(self.url)!r} is no remote; give a URL such as {_EXAMPLES}")
        if not place and parts.scheme != "memory":
            raise ConfigError(f"{redact(self.url)!r} names no host, bucket or path; give a URL such as {_EXAMPLES}")

    @property
    def scheme(self) -> str:
        """The URL's scheme."""
        return urlsplit(self.url).scheme

    @property
    def shown(self) -> str:
        """The URL as people and logs may see it."""
        return redact(self.url)

    @property
    def lookup_limit_s(self) -> float:
        """`lookup_timeout_s`, or its default for this kind of remote."""
        return self.lookup_timeout_s or (0.1 if self.scheme in REDIS_SCHEMES else 0.5)
