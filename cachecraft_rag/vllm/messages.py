"""Messages about a request between the parts of a server.

Ask         front end → scheduler: segments of the prompt and how to reuse them; signed, in `kv_transfer_params`
Fill        scheduler → workers: result of the look-up, and the blocks to fill
StepResult  workers → scheduler: reports of finished requests, and the segments that are being captured
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Literal, Self, TypedDict

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store.row_checks import LookupResult
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.prompts import Prompt, Segment, TokenIds, token_array

FIELD = "cachecraft"  # field of `kv_transfer_params`, in both directions
REPORTS = "reports"  # field of vLLM's statistics: `Ask.name` → report of a filled request
CORRECTIONS = "corrections"  # field of vLLM's statistics: `Corrections`
_KINDS = ("system", "chunk", "question")

# Kind, id, number of tokens, `private`, `closing` and `found` of a segment.
_SegmentEntry = tuple[Literal["system", "chunk", "question"], str, int, bool, int, bool]


class Corrections(TypedDict):
    """Corrections of vLLM's statistics of one scheduler. All but `idle_waiting` are running totals.

    requests      look-ups to add to those that vLLM has counted; never positive, -1 for each filling under way
    queries       tokens of these look-ups
    hits          filled tokens that were reused; vLLM's own number counts all filled tokens
    idle_waiting  requests in idle time that wait now
    """

    requests: int
    queries: int
    hits: int
    idle_waiting: int


class FillReport(TypedDict, total=False):
    """Report of a request whose prompt was filled, as plain JSON values.

    segments     values of each segment, see `serving.request.SegmentReport`
    row_layers   rows computed, summed over layers
    focus_layer  layer after which early termination stopped recomputation; None: it did not
    planned_s    time for planning, in seconds
    waited_s     time spent waiting for loads, in seconds
    remote       outcome of the look-up in the remote; None without one
    fixed        pairs [segment, tokens], see `Candidate.fixed`; missing if no new variant is wanted
    recomputed   offsets in each segment of its recomputed tokens, if the request asked for details
    layer_by_layer  reason why this server fills all prompts, or those with captures, layer by layer; missing if not
    refused      reason why vLLM computed the prompt without chunk-caches; the connector then sends no other fields
    given_up     True if the request was given up; then there are no other fields
    """

    segments: list[dict[str, object]]
    row_layers: int
    focus_layer: int | None
    planned_s: float
    waited_s: float
    remote: str | None
    fixed: list[list[int]]
    recomputed: list[list[int]]
    layer_by_layer: str
    refused: str
    given_up: bool


@dataclass(frozen=True)
class Ask:
    """A request to fill a prompt's blocks from chunk-caches.

    prompt       segments of the prompt; the last one is the question
    config       how chunk-caches are reused
    session      session whose private chunk-caches may be read and written besides the shared ones
    primed       True if its captures come from priming
    captures     indices of the segments to capture; None: all that are computed, if `config.capture`
    details      True if the report lists the recomputed tokens
    when_stored  True if the answer waits until the captures are stored
    client_salt  part of this request's salts: the client's `cache_salt`, or a random one, to share no blocks; "": none
    idle         True if the request captures new variants or audits: it runs only while the server is idle, computes
                 exactly, and is given up if another request lacks blocks
    never_stored indices of an idle request's found segments that may not be stored yet in any context. No other request
                 would store them, so on a busy server it begins after a while, and is not paused once it has begun
    own_tokens   tokens at the end of the prompt that vLLM computes itself: one, or in an audit one for each token of
                 the answer, because vLLM predicts the next token only where it computes
    namespace    tenant of the request; "": the server's own
    name         name under which the front end receives the report once the prompt is filled; "": only with the answer
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
    never_stored: tuple[int, ...] = ()
    own_tokens: int = 1
    name: str = ""
    namespace: str = ""

    @property
    def waits(self) -> bool:
        """True if the request pauses while others run, even if it has begun: an `idle` one without `never_stored`."""
        return self.idle and not self.never_stored

    @property
    def left_to_server(self) -> str:
        """Reason why vLLM computes the whole prompt: settings reuse and capture nothing; "" if it may be filled."""
        config = self.config
        if config.reuse or config.capture or self.captures is not None:
            return ""
        tokens = self.prompt.bounds[-1]
        if config.is_too_short(tokens):
            return f"it has {tokens} tokens, and reuse begins at {config.min_prompt_tokens} (min_prompt_tokens)"
        if self.prompt.segments[0].private and self.session is None:
            return (
                "its instruction or its tools are private (private_system), and it has no session that chunk-caches "
                "after them could belong to: send one, or leave private_system out"
            )
        return "reuse is off, and nothing is to be captured"

    def message(self, key: str) -> dict[str, object]:
        """Return plain JSON values for `kv_transfer_params[FIELD]`, signed with the server's key, see `read`.

        The fields are those of this class, but "segments" in place of the prompt, and "seal", the signature. Token ids
        are not in the message, and are covered by the signature.
        """
        names = [field.name for field in fields(self) if field.name != "prompt"]
        message: dict[str, object] = {name: getattr(self, name) for name in names}
        message["config"] = asdict(self.config)
        message["segments"] = [
            [
                segment.kind,
                segment.segment_id,
                len(segment.token_ids),
                segment.private,
                segment.closing,
                segment.found,
            ]
            for segment in self.prompt.segments
        ]
        return message | {"seal": _seal(message, self.prompt.token_array, key)}

    @classmethod
    def read(cls, message: object, token_ids: Sequence[int], key: str) -> Self:
        """Return the request in a `message` about these tokens, the token ids of its whole prompt.

        Messages are signed (field "seal") because segments name chunks and sessions: the body of a request, which any
        client can write, must not choose the session whose chunk-caches are read, or the names under which captures are
        stored. Raises ConfigError unless this server signed the message, for these tokens, and in this version's form.
        """
        if not isinstance(message, Mapping):
            raise ConfigError("the message is no mapping")
        given = dict(message)
        seal = given.pop("seal", None)
        try:
            ids = token_array(token_ids)
            ours = _seal(given, ids, key).encode()
        except (TypeError, ValueError, OverflowError):  # no JSON, or no token ids
            ours = b""
        if not (
            ours
            and isinstance(seal, str)
            and hmac.compare_digest(seal.encode("utf-8", "replace"), ours)
        ):
            raise ConfigError(
                "it is not sealed with this server's key, or its prompt was changed on the way"
            )
        try:
            config = ReuseConfig().changed_by(given.pop("config"))
            prompt = _prompt(given.pop("segments"), ids)
            captures = given.pop("captures")
            never_stored = tuple(given.pop("never_stored"))
            return cls(
                prompt,
                config,
                captures=None if captures is None else tuple(captures),
                never_stored=never_stored,
                **given,
            )
        except (KeyError, TypeError, ValueError) as error:  # signed by another version
            raise ConfigError(f"it cannot be read: {error!r}") from error

    @property
    def instruction_tokens(self) -> int:
        """Number of tokens of the instruction, 0 without one; in unmarked text of the head before the first passage."""
        segment = self.prompt.segments[0]
        return len(segment.token_ids) if segment.kind == "system" else 0

    @property
    def request_salt(self) -> str:
        """The `cache_salt` of a request to vLLM, see `salt_of`; "" without a tenant, a session and a client's salt."""
        return salt_of(self.session, self.client_salt, tenant=self.namespace)

    def cache_salt(self, own: str) -> str:
        """Return the salt of blocks with chunks in vLLM's prefix cache, 32 hex digits; `own`: the server's namespace.

        It differs between namespaces, sessions, clients' salts, settings of reuse and prefixes of segments.
        """
        settings = json.dumps(asdict(self.config), sort_keys=True)
        owner = ["private", self.session] if self.session is not None else ["shared"]
        ids = [segment.segment_id for segment in self.prompt.segments[:-1]]
        namespace = self.namespace or own
        return digest("cachecraft salt", self.client_salt, namespace, *owner, settings, *ids)


def salt_of(session: str | None, client_salt: str, *, tenant: str = "") -> str:
    """Return vLLM's `cache_salt` for a tenant ("": the server's own), a session and a client's own salt.

    It has 32 hex digits, or is "" without all three: such blocks serve everyone. A client's salt is digested,
    because a salt that a client can compute would give it the blocks of a session or those with chunks.
    """
    salt = digest("client salt", client_salt) if client_salt else ""
    if session is not None:
        salt = digest("session salt", session, client_salt)
    return digest("tenant salt", tenant, salt) if tenant else salt


def _seal(message: Mapping[str, object], token_ids: TokenIds, key: str) -> str:
    """Return the keyed digest of a message and the prompt's token ids, 32 hex digits."""
    text = json.dumps(message, sort_keys=True)
    digest_of_all = hashlib.blake2b(text.encode(), key=key.encode()[:64], digest_size=16)
    digest_of_all.update(b"\0")  # which JSON does not contain
    digest_of_all.update(token_ids.astype("<i4", copy=False).tobytes())
    return digest_of_all.hexdigest()


def _prompt(segments: Sequence[_SegmentEntry], token_ids: TokenIds) -> Prompt:
    edges = [0, *accumulate(int(length) for _, _, length, *_ in segments)]
    kinds = [kind for kind, *_ in segments]
    if edges[-1] != len(token_ids) or min(length for _, _, length, *_ in segments) < 1:
        raise ValueError(f"its segments have {edges[-1]} tokens, the prompt {len(token_ids)}")
    if len(kinds) < 2 or kinds[-1] != "question" or not set(kinds) <= set(_KINDS):
        raise ValueError("its segments are not a system segment, chunks and a question")
    return Prompt(
        tuple(
            Segment(
                kind,
                name,
                token_ids[start:stop],
                private=private,
                closing=closing,
                found=is_found,
            )
            for (kind, name, _, private, closing, is_found), start, stop in zip(
                segments, edges, edges[1:], strict=False
            )
        )
    )


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that a request uses.

    number       its id in this server of vLLM
    fingerprint  fingerprint of the model with the adapter
    """

    number: int
    fingerprint: str


@dataclass(frozen=True)
class Fill:
    """The blocks of one request that are to be filled.

    found, scores  result of the look-up, unchanged for the life of the request
    start, stop    positions `start:stop` are to be filled; earlier ones come from vLLM's own prefix cache
    blocks         blocks of the whole prompt
    again          True if it was filled before and then preempted: its segments are not captured twice
    adapter        LoRA adapter under which it is computed and captured; None: the base model
    """

    request_id: str
    ask: Ask
    found: LookupResult
    scores: Mapping[str, TokenScores]
    start: int
    stop: int
    blocks: tuple[int, ...]
    again: bool = False
    adapter: Adapter | None = None


@dataclass(frozen=True)
class StepResult:
    """Results of a step: the workers' report to the scheduler.

    reports    request → its report, see `filling.Filling.report`
    capturing  segments that are being captured; None: unchanged
    """

    reports: Mapping[str, FillReport]
    capturing: frozenset[str] | None = None

    def joined(self, other: StepResult) -> StepResult:
        """Return joint results: of two reports of a request this rank's, of `capturing` the union (None: none)."""
        capturing = (
            self.capturing
            if other.capturing is None
            else other.capturing | (self.capturing or frozenset())
        )
        return StepResult({**other.reports, **self.reports}, capturing)
