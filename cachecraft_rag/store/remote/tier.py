"""`RemoteTier`: chunk-caches that several engines share. Every wait is limited, and every failure counts as a miss."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.store.layout import Encoded, longest_payload, size_of
from cachecraft_rag.store.processes import HomeProcess
from cachecraft_rag.store.remote.base import Parcel, Usage
from cachecraft_rag.store.remote.breaker import State
from cachecraft_rag.store.remote.config import RemoteConfig
from cachecraft_rag.store.remote.connection import Connection
from cachecraft_rag.store.remote.outbox import Outbox
from cachecraft_rag.store.remote.rows import Row, decode_row, name_of, place_of
from cachecraft_rag.store.remote.signing import DIGEST_BYTES, SLICE_BYTES, Signer
from cachecraft_rag.store.remote.stream import End, RemoteStream
from cachecraft_rag.store.row_checks import LookupResult, RowBounds
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.store_reasons import LoadFailure, Unavailable
from cachecraft_rag.types.variants import PayloadFacts, Variant, VariantKey

logger = logging.getLogger("cachecraft_rag.store")
T = TypeVar("T")
# Most bytes of rows per look-up: usual look-ups have a hundredth, and parsing more would take too long.
MOST_ROW_BYTES = 8 << 20
MOST_REMOVED = 8  # damaged rows that one look-up removes
MOST_FOREIGN = 256  # unsigned rows that are remembered
MOST_SCORES = 20_000  # variants whose token scores are remembered
STATS_S = 2.0  # time limit of statistics for an administrator, in seconds


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Contents of the remote (None: not asked, or no answer in time), and counts of this process.

    url       URL without its secrets
    breaker   "closed": in use; "open": not asked after repeated failures; "probing": being tried again
    opened    how often the breaker has opened
    variants  number of chunk-caches on the remote, those of other engines included; `nbytes` are their bytes
    budget    limit of Redis (`maxmemory`) or of a folder, in bytes; also None for another remote and without a limit
    queued_bytes  bytes of chunk-caches that wait or are being sent
    lookups   outcome → number of look-ups: "answered", "failed", "too slow", "left alone"
    reads     outcome → number of payloads: "whole", "gone", "short", "failed"; those closed early, or with a wrong
              signature, do not count
    captures  outcome → number of chunk-caches: "sent", "already there", "no room", or the reason why not sent
    """

    url: str
    breaker: State
    opened: int
    variants: int | None
    nbytes: int | None
    budget: int | None
    queued_bytes: int
    lookups: dict[str, int]
    reads: dict[str, int]
    captures: dict[str, int]


class RemoteTier(Closeable):
    """Shared chunk-caches on a server, by identity.

    Any thread may call any method; only `flush` and `close` wait long. The tier closes itself when the program ends.
    """

    def __init__(
        self, config: RemoteConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Return without waiting for a server: look-ups notice if it is down. ConfigError if a folder is missing."""
        self.config = config
        keys = config.keys()
        self._signer = Signer(keys) if keys else None
        self._home = HomeProcess("remote tier")
        self._lock = threading.Lock()  # guards the fields below; held for moments only
        self._closed = False
        # by variant id, from rows already seen
        self._scores: OrderedDict[str, TokenScores] = OrderedDict()
        # variant id → name of a row without a valid signature
        self._foreign: OrderedDict[str, str] = OrderedDict()
        self._lookups: Counter[str] = Counter()
        self._reads: Counter[str] = Counter()
        self._connection = Connection(config, clock=clock)
        self._outbox = Outbox(self._connection)
        atexit.register(self.close)

    # -- a request's path ---------------------------------------------------------------------------------------------

    def find(
        self,
        namespace: str,
        fingerprint: str,
        chunk_ids: Sequence[str],
        bounds: RowBounds | None = None,
    ) -> LookupResult:
        """Look up shared variants of these chunks within `bounds`; waits at most `config.lookup_limit_s` seconds.

        Damaged and impossible rows are removed from the remote in the background, at most 8 a call. Rows without a
        valid signature stay, as an engine with a wrong key must not empty the remote for others; so do rows of a codec
        that is not installed here, and those beyond 8 MiB in all. Without `bounds`, rows are not compared with a model
        or a prompt, and variants have no layout. Token scores are remembered for `token_scores`, and the outcome is
        counted. If the remote is closed, fails or is too slow, the lists are empty, and `remote` of the result says
        why.
        """
        places = {
            chunk_id: place_of(VariantKey(namespace, fingerprint, chunk_id, ()))
            for chunk_id in chunk_ids
        }
        outcome, answer = self._ask_rows(list(places.values()))
        lookup = LookupResult({chunk_id: [] for chunk_id in places}, remote=outcome)
        left = MOST_ROW_BYTES
        damaged = 0
        for chunk_id, rows in zip(places, answer, strict=False):
            for name, raw in rows.items():
                left -= len(raw)
                if left < 0:
                    lookup.refused[chunk_id] = "there are too many rows on the remote"
                    break
                try:
                    row = decode_row(
                        raw, namespace=namespace, fingerprint=fingerprint, chunk_id=chunk_id
                    )
                    self._require(row, name, bounds)
                except ConfigError as error:  # a codec that is not installed here: the row stays
                    lookup.refused[chunk_id] = (
                        f"what the remote has of it cannot be used here: {error}"
                    )
                except ValueError as error:
                    logger.info("Row on the remote, %s: %s", name, error)
                    lookup.refused[chunk_id] = f"what the remote has of it is damaged: {error}"
                    damaged += 1
                    if damaged <= MOST_REMOVED:  # the next look-up removes more
                        self._connection.in_background(self._connection.backend.remove(name))
                else:
                    if self._is_signed(raw, row):
                        self._remember(
                            self._scores, row.variant.variant_id, row.token_scores, most=MOST_SCORES
                        )
                        lookup.variants[chunk_id].append(
                            bounds.with_layout(row.variant) if bounds else row.variant
                        )
                    else:
                        self._remember(
                            self._foreign, row.variant.variant_id, name, most=MOST_FOREIGN
                        )
                        lookup.refused[chunk_id] = (
                            "what the remote has of it is not signed with our key"
                        )
        return lookup

    def token_scores(self, variant_ids: Sequence[str]) -> dict[str, TokenScores]:
        """Return variant id → a copy of its token scores, if a look-up has seen its row; otherwise `inter` is None.

        The last 20,000 variants are remembered.
        """
        with self._lock:
            return {
                variant_id: _copied(self._scores.get(variant_id, TokenScores()))
                for variant_id in variant_ids
            }

    def open(self, variant: Variant) -> RemoteStream | Unavailable:
        """Begin to read the payload of a variant from a look-up, here or in another process; close the stream.

        Does not wait: a payload that is missing raises FileNotFoundError at the first read. With a key, reads verify
        signatures (ValueError). A payload that turns out to be missing or too short is removed from the remote, and
        failures may open the circuit breaker. Unavailable: NOT_OFFERED without a payload, CLOSED after `close`,
        CIRCUIT_OPEN while the remote is not asked.
        """
        facts = variant.payload_facts
        name = variant.variant_id
        if not facts.nbytes:
            return Unavailable(name, LoadFailure.NOT_OFFERED, "no look-up on the remote gave it")
        if self._closed:
            return Unavailable(name, LoadFailure.CLOSED, "the remote tier is closed")
        if not self._connection.allows():
            return Unavailable(
                name, LoadFailure.CIRCUIT_OPEN, "the remote is left alone after repeated failures"
            )
        timeout_s = self.config.tuning.read_timeout_s
        signer = self._signer
        try:
            return RemoteStream(
                self._connection.backend.read(name_of(variant)),
                facts.nbytes,
                submit=self._connection.submit,
                timeout_s=timeout_s,
                first_timeout_s=timeout_s + self.config.tuning.connect_timeout_s,
                ended=partial(self._ended, variant),
                confirms=partial(signer.confirms, facts.seal) if signer is not None else None,
            )
        except RuntimeError:
            return Unavailable(name, LoadFailure.CLOSED, "the remote tier is closed")

    def put(self, variant: Variant, encoded: Encoded, token_scores: TokenScores) -> bool:
        """Send a shared variant in the background; return True if it is queued, False if it is dropped.

        Private variants are never sent. The bytes of `encoded` must not change after this call. They are signed in the
        caller's thread. For what follows see `Outbox.offer`; an entry of the same identity that `find` has refused for
        its signature is removed from the remote once this one is sent.
        """
        if variant.session is not None or self._closed:
            return False
        seal = self._signer.seal(encoded) if self._signer is not None else b""
        facts = PayloadFacts(nbytes=size_of(encoded), seal=seal)
        raw = Row(replace(variant, home="remote", payload_facts=facts), token_scores).encode()
        # an unsigned row of the variant is replaced: otherwise it would block signed ones forever
        with self._lock:
            foreign = self._foreign.pop(variant.variant_id, None)
        signed = raw if self._signer is None else self._signer.sign(raw)
        return self._outbox.offer(Parcel(name_of(variant), signed, encoded, foreign))

    def remove_shared(self, variants: Iterable[Variant]) -> None:
        """Remove the shared ones of these variants, see `remove`; private ones are on no remote."""
        for variant in variants:
            if variant.session is None:
                self.remove(variant)

    def remove(self, variant: Variant) -> None:
        """Remove a variant's entry of that `created` in the background if the breaker is closed, not after `close`."""
        self._connection.in_background(self._connection.backend.remove(name_of(variant)))

    # -- administration -----------------------------------------------------------------------------------------------

    def stats(self, *, ask: bool = True) -> RemoteStats:
        """Return sizes and counts; with `ask`, the server is asked for its contents, for at most two seconds.

        `variants`, `nbytes` and `budget` are None if it is not asked, also for a breaker that is not closed, or does
        not answer, which does not count as a failure.
        """
        usage: Usage | None = None
        if ask and not self._closed and self._connection.allows():
            try:
                usage = self._connection.ask(self._connection.backend.usage(), STATS_S)
            except OSError as error:
                logger.info(
                    "The remote %s could not list its chunk-caches: %s", self.config.shown, error
                )
        with self._lock:
            return RemoteStats(
                url=self.config.shown,
                breaker=self._connection.breaker.state,
                opened=self._connection.breaker.opened,
                variants=usage.variants if usage else None,
                nbytes=usage.nbytes if usage else None,
                budget=usage.budget if usage else None,
                queued_bytes=self._outbox.queued_bytes,
                lookups=dict(self._lookups),
                reads=dict(self._reads),
                captures=dict(self._outbox.captures),
            )

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until captures so far are sent or dropped; False after `timeout_s` (None: no limit). Not in a fork."""
        return self._outbox.flush(timeout_s)

    def close(self) -> None:
        """Send queued captures for at most `config.tuning.close_timeout_s` seconds, then cancel all transfers.

        It does not wait for captures while the remote is not asked after repeated failures. Ending the connection takes
        up to two seconds more. Captures that were not sent are lost; open streams end with OSError. Afterwards `find`
        finds nothing, `open` returns Unavailable, and `put` returns False. Does nothing in a fork of the process.
        """
        if not self._home.here:  # a fork of the process has neither the loop nor the queue
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._connection.begin_close()
        self._outbox.flush(
            self.config.tuning.close_timeout_s if self._connection.breaker.allows() else 0.0
        )
        self._connection.close()

    # -- small parts --------------------------------------------------------------------------------------------------

    def _ask_rows(self, places: list[str]) -> tuple[str, list[dict[str, bytes]]]:
        """Return the outcome of the remote look-up, and name → row of each place."""
        outcome = "answered"
        rows = list[dict[str, bytes]]()
        if self._closed or not self._connection.allows():
            outcome = "left alone"
        elif places:
            try:
                rows = self._connection.ask(
                    self._connection.backend.rows(places), self.config.lookup_limit_s
                )
                self._connection.breaker.succeeded("lookup")
            except OSError as error:
                self._connection.failed("lookup", error)
                outcome = "too slow" if isinstance(error, TimeoutError) else "failed"
        with self._lock:
            self._lookups[outcome] += 1
        return outcome, rows

    def _require(self, row: Row, name: str, bounds: RowBounds | None) -> None:
        """Raise ValueError unless the row is in the right place and its payload has a possible size."""
        if name_of(row.variant) != name:
            raise ValueError("row of another variant")
        if bounds is None:
            return
        if flaw := bounds.flaw(row.variant):
            raise ValueError(flaw)
        if row.variant.payload_facts.nbytes > longest_payload(row.variant, bounds.layout):
            raise ValueError("its payload is longer than any of that many tokens")

    def _is_signed(self, raw: bytes, row: Row) -> bool:
        """Return True if a row is trusted; without a key every row is."""
        if self._signer is None:
            return True
        facts = row.variant.payload_facts
        slices = -(-facts.nbytes // SLICE_BYTES)
        return self._signer.is_signed(raw) and len(facts.seal) == slices * DIGEST_BYTES

    def _remember(
        self, table: OrderedDict[str, T], variant_id: str, value: T, *, most: int
    ) -> None:
        with self._lock:
            table[variant_id] = value
            table.move_to_end(variant_id)
            if len(table) > most:
                table.popitem(last=False)

    def _ended(self, variant: Variant, end: End) -> None:
        with self._lock:
            self._reads[end] += 1
        if end == "whole":
            self._connection.breaker.succeeded("read")
        elif end == "failed":
            self._connection.failed("read", "a transfer failed or paused for too long")
        else:  # evicted since the look-up, or truncated
            self.remove(variant)


def _copied(scores: TokenScores) -> TokenScores:
    """Return a copy whose array may be changed."""
    return TokenScores(None if scores.inter is None else scores.inter.copy())
