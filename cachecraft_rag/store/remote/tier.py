"""`RemoteTier`: what several engines share. Every wait has an end, every failure is a miss."""

from __future__ import annotations

import asyncio
import atexit
import logging
import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.store.eviction import worth, worth_gained
from cachecraft_rag.store.expected import Expected, Found
from cachecraft_rag.store.layout import Encoded, OlderVersionError, longest_payload
from cachecraft_rag.store.processes import HomeProcess
from cachecraft_rag.store.remote.base import Backend, Parcel, Usage
from cachecraft_rag.store.remote.breaker import Breaker, State
from cachecraft_rag.store.remote.config import REDIS_SCHEMES, RemoteConfig
from cachecraft_rag.store.remote.outbox import Outbox
from cachecraft_rag.store.remote.rows import Row, decode_row, name_of, place_of
from cachecraft_rag.store.remote.signing import DIGEST_BYTES, SLICE_BYTES, Signer
from cachecraft_rag.store.remote.stream import End, RemoteStream
from cachecraft_rag.types import LoadFailure, Payload, TokenScores, Unavailable, Variant, VariantKey

logger = logging.getLogger("cachecraft_rag.store")
T = TypeVar("T")
MOST_ROW_BYTES = 8 << 20  # of one look-up: honest ones have a hundredth, and more would take its time to be read
MOST_REMOVED = 8  # damaged rows, by one look-up
MOST_FOREIGN = 256
MOST_ROWS = 20_000  # remembered, of what look-ups found and puts sent
STATS_S = 2.0  # an administrator waits longer than a request, but not for ever
ATTEMPTS, BACKOFF_S = 3, 0.01


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """The remote as a whole (None: it did not say in time) and what this process did with it.

    breaker  "closed": in use; "open": left alone after repeated failures; "probing": being tried again
    opened   how often the breaker has opened
    lookups  look-ups by outcome: "answered", "failed", "too slow", "left alone"
    reads    payloads by outcome: "whole", "gone", "short", "failed"; those closed early are not counted
    captures   chunk-caches by outcome: "sent", "already there", "no room", or why one was not sent
    """

    url: str
    breaker: State
    opened: int
    variants: int | None
    nbytes: int | None
    budget: int
    queued_bytes: int
    lookups: dict[str, int]
    reads: dict[str, int]
    captures: dict[str, int]


class RemoteTier(Closeable):
    """Shared chunk-caches on a server, by identity. Any thread may call any method; no method but `close` waits long.

    All talk with the server runs in one event loop in a thread of its own: there every wait can be given up at any
    moment, whatever the library or the server does. Blocking calls in a pool of threads were rejected: a server that
    hangs would fill the pool.
    """

    def __init__(self, config: RemoteConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is waited for: a remote that is down is noticed by the first look-ups. Raises ConfigError."""
        self.config = config
        keys = config.keys()
        self._signer = Signer(keys) if keys else None
        self._removed: OrderedDict[str, float] = OrderedDict()  # variant id → `created` of what was damaged
        self._foreign: OrderedDict[str, bytes] = OrderedDict()  # variant id → a row there that is not signed as it must
        self._home = HomeProcess("remote tier")
        self._backend = _backend_of(config)
        self._breaker = Breaker(failures=config.failures, cool_down_s=config.cool_down_s, clock=clock)
        self._lock = threading.Lock()
        self._said = threading.local()
        self._closed = self._told = False
        self._rows: OrderedDict[str, Row] = OrderedDict()
        self._lookups: Counter[str] = Counter()
        self._reads: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._outbox = Outbox(
            self._backend,
            queue_bytes=config.queue_bytes,
            timeout_s=config.put_timeout_s,
            loop=self._loop,
            allowed=self._allowed,
        )
        # A daemon: the end of the interpreter does not wait for a server that hangs. `close` runs before that.
        self._thread = threading.Thread(target=self._loop.run_forever, name="cachecraft-remote", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._submit(self._outbox.run()).add_done_callback(_log_mistake)
        self._submit(self._quietly(self._backend.probe))  # so that the first request finds a connection

    # -- a request's path ---------------------------------------------------------------------------------------------

    def lookup(self, namespace: str, fingerprint: str, chunk_ids: Sequence[str]) -> dict[str, list[Variant]]:
        """The shared variants of these chunks; every asked id is a key. Waits `config.lookup_limit_s` at most."""
        return self.find(namespace, fingerprint, chunk_ids).variants

    def find(
        self, namespace: str, fingerprint: str, chunk_ids: Sequence[str], expected: Expected | None = None
    ) -> Found:
        """As `lookup`, and why what is there is refused. With `expected`, nothing that cannot be that is given.

        What it refuses is removed there, but for what is not signed: a key that is wrong here must not empty the remote
        for others.
        """
        found = Found({chunk_id: [] for chunk_id in chunk_ids})
        places = {chunk_id: place_of(VariantKey(namespace, fingerprint, chunk_id, ())) for chunk_id in found.variants}
        outcome, answer = self._ask_rows(list(places.values()))
        self._said.outcome = outcome
        with self._lock:
            self._lookups[outcome] += 1
        left, damaged = MOST_ROW_BYTES, 0
        for (chunk_id, place), rows in zip(places.items(), answer, strict=False):
            for raw in rows:
                left -= len(raw)
                if left < 0:
                    found.refused[chunk_id] = "there are too many rows on the remote"
                    break
                try:
                    row = decode_row(raw, namespace=namespace, fingerprint=fingerprint, chunk_id=chunk_id)
                    self._require(row, expected)
                    if not self._is_signed(raw, row):
                        found.refused[chunk_id] = "what the remote has of it is not signed with our key"
                        continue
                except (ValueError, ConfigError) as error:
                    logger.info("Row on the remote below %s: %s", place, error)
                    if isinstance(error, ConfigError):  # of a newer version, which can read it: left alone
                        found.refused[chunk_id] = f"what the remote has of it cannot be used here: {error}"
                        continue
                    word = "of no use" if isinstance(error, OlderVersionError) else "damaged"
                    found.refused[chunk_id] = f"what the remote has of it is {word}: {error}"
                    damaged += 1
                    if damaged <= MOST_REMOVED:  # the next look-up goes on
                        self._in_background(partial(self._backend.remove_row, place, raw))
                    continue
                self._remember(row)
                found.variants[chunk_id].append(expected.informed(row.variant) if expected else row.variant)
        return found

    @property
    def last_outcome(self) -> str | None:
        """How the last look-up of this thread went, as in `RemoteStats.lookups`; None before the first."""
        outcome: str | None = getattr(self._said, "outcome", None)
        return outcome

    def _require(self, row: Row, expected: Expected | None) -> None:
        """Raise ValueError unless this may be a row of the model, and of what its payload may be; ConfigError."""
        if expected is None:
            return
        if flaw := expected.flaw(row.variant):
            raise ValueError(flaw)
        if row.payload_bytes > longest_payload(row.variant, expected.layout):
            raise ValueError("its payload is longer than any of that many tokens")

    def _is_signed(self, raw: bytes, row: Row) -> bool:
        """Whether a row may be believed; without a key every one is."""
        if self._signer is None:
            return True
        slices = -(-row.payload_bytes // SLICE_BYTES)
        if self._signer.signer_of(raw) is not None and len(row.variant.payload.seal) == slices * DIGEST_BYTES:
            return True
        with self._lock:
            self._foreign[row.variant.variant_id] = raw
            if len(self._foreign) > MOST_FOREIGN:
                self._foreign.popitem(last=False)
        return False

    def token_scores(self, variant_ids: Sequence[str]) -> dict[str, TokenScores]:
        """What is known of the tokens of each variant, from rows already seen; every asked id is a key."""
        with self._lock:
            rows = {variant_id: self._rows.get(variant_id) for variant_id in variant_ids}
        return {name: TokenScores() if row is None else _copied(row.token_scores) for name, row in rows.items()}

    def open(self, variant: Variant) -> RemoteStream | Unavailable:
        """Begin to read the payload of a variant that a look-up gave, here or in another process; close the stream."""
        told, name = variant.payload, variant.variant_id
        if self._removed.get(variant.variant_id) == variant.created:
            return Unavailable(name, LoadFailure.MISSING, "not on the remote any more")
        if not told.nbytes:
            return Unavailable(name, LoadFailure.NOT_OFFERED, "no look-up on the remote gave it")
        if self._closed or not self._allowed():
            return Unavailable(name, LoadFailure.LEFT_ALONE, "the remote is left alone after repeated failures")
        timeout_s, signer = self.config.read_timeout_s, self._signer
        pieces = self._backend.read(name_of(variant))
        try:
            return RemoteStream(
                pieces,
                told.nbytes,
                submit=self._submit,
                timeout_s=timeout_s,
                first_timeout_s=timeout_s + self.config.connect_timeout_s,
                ended=lambda end: self._ended(variant, end),
                confirms=partial(signer.confirms, told.seal) if signer is not None else None,
            )
        except RuntimeError:
            return Unavailable(name, LoadFailure.CLOSED, "the remote tier is closed")

    def put(self, variant: Variant, encoded: Encoded, token_scores: TokenScores) -> bool:
        """Send a shared variant in the background; False when it is dropped. Private ones never leave the machine.

        The blocks of `encoded` must not change any more. Signing them takes the caller's time.
        """
        if variant.session is not None or self._closed:
            return False
        payload = (memoryview(encoded.header), *encoded.blocks)
        seal = self._signer.seal(payload) if self._signer is not None else b""
        facts = Payload(nbytes=encoded.nbytes, seal=seal)
        row = Row(replace(variant, home="remote", payload=facts), token_scores, encoded.nbytes)
        place, _, name = row.name.rpartition("/")
        raw = row.encode() if self._signer is None else self._signer.sign(row.encode())
        with self._lock:
            known = variant.variant_id in self._rows
            foreign = self._foreign.pop(variant.variant_id, None)
        if not known:  # what a look-up told is where the remote's own copy lies
            self._remember(row)
        score = worth(saved=0.0, exact_share=variant.exact_share)
        # What is not signed gives way: else nothing that is signed could ever take its place.
        return self._outbox.offer(Parcel(place, name, raw, score, payload, foreign))

    def record_use(self, variant_id: str, saved: float) -> None:
        """Add a use there too, in the background, if this process has seen the variant there.

        A remote only adds to scores, from a clock of its own where it has one.
        """
        with self._lock:
            row = self._rows.get(variant_id)
        if row is not None:
            self._outbox.gain(row.name, worth_gained(saved, exact_share=row.variant.exact_share))

    def remove(self, variant: Variant) -> None:
        """Remove a variant whose payload turned out to be damaged, in the background."""
        with self._lock:
            row = self._rows.get(variant.variant_id)
            if row is not None and row.variant.created == variant.created:
                del self._rows[variant.variant_id]
            self._removed[variant.variant_id] = variant.created
            if len(self._removed) > MOST_ROWS:
                self._removed.popitem(last=False)
        self._in_background(partial(self._backend.remove, name_of(variant)))

    # -- administration -----------------------------------------------------------------------------------------------

    def stats(self, *, ask: bool = True) -> RemoteStats:
        """Sizes and counts; where it may `ask` the server, that takes two seconds at most."""
        usage: Usage | None = None
        if ask and not self._closed and self._allowed():
            try:
                usage = self._wait(self._backend.usage, STATS_S)
            except OSError as error:
                logger.info("The remote %s could not list its chunk-caches: %s", self.config.shown, error)
        with self._lock:
            return RemoteStats(
                url=self.config.shown,
                breaker=self._breaker.state,
                opened=self._breaker.opened,
                variants=usage.variants if usage else None,
                nbytes=usage.nbytes if usage else None,
                budget=self.config.budget_bytes,
                queued_bytes=self._outbox.queued_bytes,
                lookups=dict(self._lookups),
                reads=dict(self._reads),
                captures=dict(self._outbox.captures),
            )

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything put or used so far is sent or dropped; False when that takes longer."""
        return self._outbox.flush(timeout_s)

    def close(self) -> None:
        """Send what is waiting, for `config.close_timeout_s` at most, then give up whatever is in flight."""
        if not self._home.here:  # a fork of its process has neither its loop nor what waits there
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._outbox.flush(self.config.close_timeout_s if self._breaker.allows() else 0.0)
        asyncio.run_coroutine_threadsafe(self._wind_up(), self._loop)
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._loop.close()

    # -- small parts --------------------------------------------------------------------------------------------------

    def _ask_rows(self, places: list[str]) -> tuple[str, list[list[bytes]]]:
        if not places:
            return "answered", []
        if self._closed or not self._allowed():
            return "left alone", []
        try:
            rows = self._wait(lambda: self._backend.lookup(places), self.config.lookup_limit_s)
        except OSError as error:
            self._note_failure("lookup", error)
            return "too slow" if isinstance(error, TimeoutError) else "failed", []
        self._breaker.succeeded("lookup")
        return "answered", rows

    def _wait(self, ask: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """The answer, within `timeout_s` seconds, whatever happens in between. Raises OSError, TimeoutError."""
        try:
            future = self._submit(_patiently(ask))
        except RuntimeError:
            raise OSError("the remote tier is closed") from None
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise OSError("the remote tier was closed meanwhile") from None
        finally:
            future.cancel()

    def _allowed(self) -> bool:
        """Whether the remote may be asked. Where it is time to try it again, that happens in the background.

        While the tier is being closed, what is still to be sent goes on.
        """
        if not self._closed and self._breaker.take_probe():
            try:
                self._submit(self._probe())
            except RuntimeError:
                return False
        return self._breaker.allows()

    async def _probe(self) -> None:
        """Try once; what counts is the time on a connection that stands."""
        try:
            async with asyncio.timeout(self.config.connect_timeout_s + self.config.lookup_limit_s):
                await self._backend.probe()
            async with asyncio.timeout(self.config.lookup_limit_s):
                await self._backend.probe()
        except OSError:
            self._breaker.failed("probe")
        else:
            self._breaker.succeeded("probe")
            logger.warning("The remote %s answers again", self.config.shown)

    def _note_failure(self, kind: str, error: object) -> None:
        what = self.config.hide(error) or "too slow"
        if self._breaker.failed(kind):
            logger.warning("The remote %s failed and is not asked for a while: %s", self.config.shown, what)
        elif not self._told:  # a single question would otherwise end before the breaker says anything
            logger.warning("The remote %s failed; going on without it: %s", self.config.shown, what)
        self._told = True

    def _ended(self, variant: Variant, end: End) -> None:
        with self._lock:
            self._reads[end] += 1
        if end == "whole":
            self._breaker.succeeded("read")
        elif end == "failed":
            self._note_failure("read", "a transfer failed or paused for too long")
        else:  # evicted meanwhile, or truncated for good
            self.remove(variant)

    def _remember(self, row: Row) -> None:
        with self._lock:
            self._rows[row.variant.variant_id] = row
            self._rows.move_to_end(row.variant.variant_id)
            self._removed.pop(row.variant.variant_id, None)
            if len(self._rows) > MOST_ROWS:
                self._rows.popitem(last=False)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Hand a coroutine to the loop. Raises RuntimeError when that is closed."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise

    def _in_background(self, ask: Callable[[], Awaitable[None]]) -> None:
        if not self._closed and self._allowed():
            try:
                self._submit(self._quietly(ask))
            except RuntimeError:
                logger.info("The remote is closed; damaged chunk-caches stay there until another engine finds them")

    async def _quietly(self, ask: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self.config.put_timeout_s):
                await ask()
        except OSError as error:
            logger.info("The remote %s: %s", self.config.shown, error)

    async def _wind_up(self) -> None:
        """Cancel everything, let go of the connections, stop the loop."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=1.0) if others else None
        try:
            async with asyncio.timeout(0.5):
                await self._backend.close()
        except OSError as error:
            logger.info("Closing the remote %s failed: %s", self.config.shown, error)
        self._loop.stop()


def _log_mistake(future: Future[T]) -> None:
    """Log what the background raised: a mistake of our own must be seen."""
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("The remote stopped sending", exc_info=error)


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again after a connection that broke: a pooled one does when the server was restarted."""
    for attempt in range(1, ATTEMPTS):
        try:
            return await ask()
        except TimeoutError:
            raise
        except OSError:
            await asyncio.sleep(random.uniform(0.5, 1.0) * BACKOFF_S * 2**attempt)
    return await ask()


def _copied(scores: TokenScores) -> TokenScores:
    """The same in arrays that are free to be changed."""
    return TokenScores(*(None if one is None else one.copy() for one in (scores.inter, scores.received)))


def _backend_of(config: RemoteConfig) -> Backend:
    """The backend for the URL. Raises ConfigError."""
    try:
        if config.scheme in REDIS_SCHEMES:
            from cachecraft_rag.store.remote.redis_backend import RedisBackend

            return RedisBackend(config)
        from cachecraft_rag.store.remote.object_backend import ObjectBackend

        return ObjectBackend(config)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"A remote needs the package {error.name!r}; type: pip install 'cachecraft-rag[remote]'"
        ) from error
    except ConfigError:  # our own words, with no secret in them
        raise
    except (ValueError, TypeError) as error:
        why = config.hide(error)
    # Outside the handler: what the library said stays out of the chain of causes.
    raise ConfigError(f"The remote {config.shown} cannot be used: {why}")
