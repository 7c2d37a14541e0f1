"""Messages about a request between the parts of a server.

Ask   front end → scheduler: the prompt's segments and how to reuse them, in `kv_transfer_params`, sealed
Fill  scheduler → workers: the result of the look-up, and the blocks to fill
News  workers → scheduler: reports of finished requests, and which segments are being captured
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any, Self

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store.row_checks import LookupResult
from cachecraft_rag.types import Prompt, Segment, TokenScores, digest

FIELD = "cachecraft"  # of `kv_transfer_params`, in both directions
REPORTS = "reports"  # of requests that are filled, in vLLM's statistics, by `Ask.name`
_KINDS = ("system", "chunk", "question")


@dataclass(frozen=True)
class Ask:
    """A request for a prompt to be filled from chunk-caches.

    prompt    its segments; the last one is the question
    config    how chunk-caches are reused
    session   whose private chunk-caches may be used and made besides the shared ones
    primed    its captures are made ahead of questions
    captures  segments to capture; None: as `config` says
    details   the report lists the recomputed tokens
    when_stored  the answer waits until its captures are stored
    client_salt  the `cache_salt` that a client gave, if any: part of this request's own
    idle         a new variant: computed while nothing else is under way, exactly, and given up where blocks are short
    first        segments of an idle one that nobody marked: nothing of them may be stored yet, and nothing else would
                 store them, so where the server never idles it begins after a while, and goes on once it has begun
    name         under which the front end is sent its report as soon as it is filled; empty: only with its answer
    """

    prompt: Prompt
    config: ReuseConfig
    session: str | None = None
    primed: bool = False
    captures: tuple[int, ...] | None = None
    details: bool = False
    when_stored: bool = False
    client_salt: str = ""
    idle: bool = False
    first: tuple[int, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        """Refuse what vLLM cannot do; raises ConfigError."""
        if self.config.refresh_rows:
            raise ConfigError(
                "refresh_rows needs the engine in this process: a decode step of vLLM carries rows of the answer only"
            )

    @property
    def waits(self) -> bool:
        """True if it stands still while anything else is under way, even if it has begun."""
        return self.idle and not self.first

    def message(self, key: str) -> dict[str, Any]:
        """Plain JSON values for `kv_transfer_params[FIELD]`, sealed with the server's key, see `read`."""
        message = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "prompt"}
        message["config"] = asdict(self.config)
        message["segments"] = [
            [one.kind, one.segment_id, len(one.token_ids), one.private, one.closing, one.found]
            for one in self.prompt.segments
        ]
        return message | {"seal": _seal(message, self.prompt.token_ids, key)}

    @classmethod
    def read(cls, message: object, token_ids: Sequence[int], key: str) -> Self:
        """Read back a `message` about these tokens.

        Sealed, because segments name chunks and sessions: a request's body, which anybody can write, must not decide
        whose chunk-caches are read, or under which names captures are stored.

        Raises ConfigError with the reason where it is not one of ours, or about other tokens.
        """
        if not isinstance(message, Mapping):
            raise ConfigError("the message is no mapping")
        given = dict(message)
        seal = given.pop("seal", None)
        try:
            ours = _seal(given, token_ids, key).encode()
        except (TypeError, ValueError):  # no JSON
            ours = b""
        if not (ours and isinstance(seal, str) and hmac.compare_digest(seal.encode("utf-8", "replace"), ours)):
            raise ConfigError("it is not sealed with this server's key, or its prompt was changed on the way")
        try:
            config, prompt = ReuseConfig(**given.pop("config")), _prompt(given.pop("segments"), token_ids)
            captures, first = given.pop("captures"), tuple(given.pop("first"))
            return cls(prompt, config, captures=None if captures is None else tuple(captures), first=first, **given)
        except (KeyError, TypeError, ValueError) as error:  # sealed by another version
            raise ConfigError(f"it cannot be read: {error!r}") from error

    def cache_salt(self, namespace: str) -> str:
        """Salt for vLLM's prefix cache: blocks filled for this request serve only requests with the same salt."""
        settings = json.dumps(asdict(self.config), sort_keys=True)
        owner = ["private", self.session] if self.session is not None else ["shared"]
        ids = [segment.segment_id for segment in self.prompt.segments[:-1]]
        return digest("cachecraft salt", self.client_salt, namespace, *owner, settings, *ids)


def _seal(message: Mapping[str, Any], token_ids: Sequence[int], key: str) -> str:
    text = json.dumps([message, list(token_ids)], sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=key.encode()[:64], digest_size=16).hexdigest()


def _prompt(segments: Sequence[Sequence[Any]], token_ids: Sequence[int]) -> Prompt:
    edges = [0, *accumulate(int(length) for _, _, length, *_ in segments)]
    kinds = [kind for kind, *_ in segments]
    if edges[-1] != len(token_ids) or min(length for _, _, length, *_ in segments) < 1:
        raise ValueError(f"its segments have {edges[-1]} tokens, the prompt {len(token_ids)}")
    if len(kinds) < 2 or kinds[-1] != "question" or not set(kinds) <= set(_KINDS):
        raise ValueError("its segments are not a system segment, chunks and a question")
    return Prompt(
        tuple(
            Segment(kind, name, tuple(token_ids[start:stop]), private=private, closing=closing, found=found)
            for (kind, name, _, private, closing, found), start, stop in zip(segments, edges, edges[1:], strict=False)
        )
    )


@dataclass(frozen=True)
class Fill:
    """Blocks of one request to be filled.

    found, scores  of the look-up, frozen for as long as the request lives
    first, last    positions `first:last` are to be filled; those before come from vLLM's own prefix cache
    blocks         of the whole prompt
    again          it was filled before and preempted: its segments are not captured twice
    """

    request_id: str
    ask: Ask
    found: LookupResult
    scores: Mapping[str, TokenScores]
    first: int
    last: int
    blocks: tuple[int, ...]
    again: bool = False


@dataclass(frozen=True)
class News:
    """Report of the workers after a step.

    reports    by request, see `filling.Filling.report`
    capturing  segments whose captures are under way; None: unchanged
    """

    reports: Mapping[str, Mapping[str, Any]]
    capturing: frozenset[str] | None = None

    def joined(self, other: News) -> News:
        """Join them with another rank's: the first one's reports count, and only it captures."""
        capturing = self.capturing if other.capturing is None else other.capturing | (self.capturing or frozenset())
        return News({**other.reports, **self.reports}, capturing)
