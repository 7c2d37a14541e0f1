"""What the parts of a server tell each other about a request.

Ask   who builds the prompt → scheduler: the prompt's segments and how to reuse them, in `kv_transfer_params`, sealed
Fill  scheduler → workers: what a look-up found, and the blocks to fill
News  workers → scheduler: reports of finished requests, and which segments are being captured
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Self

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store.expected import Found
from cachecraft_rag.types import Prompt, Segment, TokenScores, digest

FIELD = "cachecraft"  # of `kv_transfer_params`, in both directions
_KINDS = ("system", "chunk", "question")


@dataclass(frozen=True)
class Ask:
    """One request's wish to have its prompt filled from chunk-caches.

    prompt    its segments; the last one is the question
    config    how chunk-caches are reused
    session   whose private chunk-caches may be used and made besides the shared ones
    primed    its captures are made ahead of questions
    when_stored  the answer waits until its captures are stored
    captures  segments to capture; None: as `config` says
    details   the report lists the recomputed tokens
    client_salt  the `cache_salt` that a client gave, if any: part of this request's own
    """

    prompt: Prompt
    config: ReuseConfig
    session: str | None = None
    primed: bool = False
    captures: tuple[int, ...] | None = None
    details: bool = False
    when_stored: bool = False
    client_salt: str = ""

    def message(self, key: str) -> dict[str, Any]:
        """For `kv_transfer_params[FIELD]`, as plain JSON values; sealed with the server's key, see `read`."""
        told: dict[str, Any] = {
            "segments": [
                [one.kind, one.segment_id, len(one.token_ids), one.private, one.closing] for one in self.prompt.segments
            ],
            "config": asdict(self.config) | {"ablate": sorted(self.config.ablate)},
            "session": self.session,
            "primed": self.primed,
            "captures": None if self.captures is None else list(self.captures),
            "details": self.details,
            "when_stored": self.when_stored,
            "client_salt": self.client_salt,
        }
        return told | {"seal": _seal(told, self.prompt.token_ids, key)}

    @classmethod
    def read(cls, message: object, token_ids: Sequence[int], key: str) -> Self:
        """The ask that `message` made of these tokens.

        Sealed, because segments name chunks and sessions: what anybody may write into a request's body must not
        decide whose chunk-caches are read, or under which names captures are stored.

        Raises ConfigError with the reason where it is not one of ours, or of other tokens.
        """
        if not isinstance(message, Mapping):
            raise ConfigError("what it asks for is no mapping")
        told = {name: value for name, value in message.items() if name != "seal"}
        seal = message.get("seal")
        try:
            ours = _seal(told, token_ids, key)
        except (TypeError, ValueError):  # no JSON
            ours = ""
        if (
            not isinstance(seal, str)
            or not ours
            or not hmac.compare_digest(seal.encode("utf-8", "replace"), ours.encode())
        ):
            raise ConfigError("it is not sealed with this server's key, or its prompt was changed on the way")
        try:
            config = ReuseConfig(**told["config"])
            prompt = _prompt(told["segments"], token_ids)
            captures = None if told["captures"] is None else tuple(told["captures"])
            flags = {name: told[name] for name in ("primed", "details", "when_stored", "client_salt")}
            return cls(prompt, config, told["session"], captures=captures, **flags)
        except (KeyError, TypeError, ValueError) as error:  # sealed by another version
            raise ConfigError(f"it cannot be read: {error!r}") from error

    def cache_salt(self, namespace: str) -> str:
        """vLLM's salt of its prefix cache for this request: blocks filled for it serve nothing that differs in it."""
        settings = json.dumps(asdict(self.config) | {"ablate": sorted(self.config.ablate)}, sort_keys=True)
        owner = ["private", self.session] if self.session is not None else ["shared"]
        ids = [segment.segment_id for segment in self.prompt.segments[:-1]]
        return digest("cachecraft salt", self.client_salt, namespace, *owner, settings, *ids)


def _seal(told: Mapping[str, Any], token_ids: Sequence[int], key: str) -> str:
    text = json.dumps([told, list(token_ids)], sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=key.encode()[:64], digest_size=16).hexdigest()


def _prompt(segments: Sequence[Sequence[Any]], token_ids: Sequence[int]) -> Prompt:
    edges = [0, *accumulate(int(length) for _, _, length, _, _ in segments)]
    kinds = [kind for kind, *_ in segments]
    if edges[-1] != len(token_ids) or min(length for _, _, length, _, _ in segments) < 1:
        raise ValueError(f"its segments have {edges[-1]} tokens, the prompt {len(token_ids)}")
    if len(kinds) < 2 or kinds[-1] != "question" or "question" in kinds[:-1] or not set(kinds) <= set(_KINDS):
        raise ValueError("its segments are not a system segment, chunks and a question")
    return Prompt(
        tuple(
            Segment(kind, name, tuple(token_ids[start:stop]), private=private, closing=closing)
            for (kind, name, _, private, closing), start, stop in zip(segments, edges, edges[1:], strict=False)
        )
    )


@dataclass(frozen=True)
class Fill:
    """Blocks of one request to be filled.

    found, scores  of the look-up, frozen for as long as the request lives
    first, last    the positions `first:last` are to be filled; what stands before is vLLM's own prefix cache's
    blocks         of the whole prompt
    again          it was filled before and preempted: nothing of it is captured twice
    """

    request_id: str
    ask: Ask
    found: Found
    scores: Mapping[str, TokenScores]
    first: int
    last: int
    blocks: tuple[int, ...]
    again: bool = False


@dataclass(frozen=True)
class News:
    """What the workers tell after a step.

    reports    by request, see `working.Filling.report`
    capturing  segments whose captures are under way; None: as told before
    """

    reports: Mapping[str, Mapping[str, Any]]
    capturing: frozenset[str] | None = None

    def joined(self, other: News) -> News:
        """With what another rank tells; the first one's reports count, and only it captures."""
        capturing = self.capturing if other.capturing is None else other.capturing | (self.capturing or frozenset())
        return News({**other.reports, **self.reports}, capturing)
