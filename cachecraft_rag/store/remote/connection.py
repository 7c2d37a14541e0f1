"""The connection to one remote: an event loop in its own thread, protected by a circuit breaker."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from cachecraft_rag.checks import from_extra
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store.closeable import Closeable
from cachecraft_rag.store.remote.base import Backend
from cachecraft_rag.store.remote.breaker import Breaker
from cachecraft_rag.store.remote.config import REDIS_SCHEMES, RemoteConfig

logger = logging.getLogger("cachecraft_rag.store")
T = TypeVar("T")


class Connection(Closeable):
    """Runs coroutines of a backend in an event loop. Its thread must not call `ask` or `close`, any other may.

    There every wait can be cancelled at any time, even if the library or the server hangs. Rejected: blocking calls in
    a pool of threads, because a server that hangs would occupy all of them.
    """

    def __init__(self, config: RemoteConfig, *, clock: Callable[[], float]) -> None:
        """Connect in the background. Raises ConfigError if URL or folder cannot be used, or a package is missing."""
        self.config = config
        self.backend = _backend_of(config)
        self.breaker = Breaker(
            failures=config.tuning.failures, cool_down_s=config.tuning.cool_down_s, clock=clock
        )
        self._closing = self._warned = False
        self._loop = asyncio.new_event_loop()
        # A daemon: the end of the interpreter does not wait for a server that hangs.
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="cachecraft-remote", daemon=True
        )
        self._thread.start()
        self.in_background(self.backend.probe())  # so that the first request finds a connection

    def submit(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Submit a coroutine to the loop, without a time limit or the breaker; return the future of its result.

        Raises RuntimeError, and closes the coroutine, after `close`. A future submitted while `close` runs may never be
        done.
        """
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise

    def ask(self, coroutine: Coroutine[object, object, T], timeout_s: float) -> T:
        """Run a coroutine, wait at most `timeout_s` seconds for its result, and return it.

        The breaker is neither asked nor changed. Raises TimeoutError when the time is up, and cancels the coroutine
        then; OSError after `close`, and if `close` is called meanwhile.
        """
        try:
            future = self.submit(coroutine)
        except RuntimeError:
            raise OSError("the remote tier is closed") from None
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise OSError("the remote tier was closed meanwhile") from None
        finally:
            future.cancel()

    def in_background(self, coroutine: Coroutine[object, object, None]) -> None:
        """Run a coroutine without waiting for it; drop it unless `allows` returns True, and after `begin_close`.

        It is cancelled after `RemoteTuning.put_timeout_s` seconds. An OSError, a time-out or a closed loop is only
        logged, and does not count as a failure for the breaker.
        """
        if self._closing or not self.allows():
            coroutine.close()
            return
        try:
            self.submit(self._quietly(coroutine))
        except RuntimeError:
            logger.info(
                "The remote %s is closed, and what was to be done there is left", self.config.shown
            )

    def allows(self) -> bool:
        """Return True if the circuit breaker is closed, so that the remote may be asked.

        If a probe is due, it is started in the background; the answer is False until it has succeeded. After
        `begin_close` no probe is started, and the answer stays the breaker's, because queued captures are still sent.
        """
        if not self._closing and self.breaker.take_probe():
            try:
                self.submit(self._probe())
            except RuntimeError:
                return False
        return self.breaker.allows()

    def failed(self, kind: str, error: object) -> None:
        """Count a failed or slow request in the breaker; log a warning at the first one and at each that opens it.

        `kind` is "lookup" or "read". An error without a text is logged as "too slow"; secrets of the URL are hidden.
        """
        what = self.config.hide(error) or "too slow"
        if self.breaker.failed(kind):
            logger.warning(
                "The remote %s failed and is not asked for a while: %s", self.config.shown, what
            )
        # otherwise a program that asks one question would end without any report
        elif not self._warned:
            logger.warning("The remote %s failed; going on without it: %s", self.config.shown, what)
        self._warned = True

    def begin_close(self) -> None:
        """Start no more work in the background, and no probe; queued captures may still be submitted."""
        self._closing = True

    def close(self) -> None:
        """Cancel all transfers, close the server's connections and end the loop, in at most two seconds.

        To be called once. A loop that hangs for longer stays open: then `submit` still accepts coroutines.
        """
        self._closing = True
        asyncio.run_coroutine_threadsafe(self._wind_up(), self._loop)
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._loop.close()

    async def _probe(self) -> None:
        """Probe the server. The first request may have to connect, so only the second one must be fast."""
        try:
            async with asyncio.timeout(
                self.config.tuning.connect_timeout_s + self.config.lookup_limit_s
            ):
                await self.backend.probe()
            async with asyncio.timeout(self.config.lookup_limit_s):
                await self.backend.probe()
        except OSError:
            self.breaker.failed("probe")
        else:
            self.breaker.succeeded("probe")
            logger.warning("The remote %s answers again", self.config.shown)

    async def _quietly(self, coroutine: Coroutine[object, object, None]) -> None:
        try:
            async with asyncio.timeout(self.config.tuning.put_timeout_s):
                await coroutine
        except OSError as error:
            logger.info("The remote %s: %s", self.config.shown, error)

    async def _wind_up(self) -> None:
        """Cancel all tasks, close the connections and stop the loop."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=1.0) if others else None
        try:
            async with asyncio.timeout(0.5):
                await self.backend.close()
        except OSError as error:
            logger.info("Closing the remote %s failed: %s", self.config.shown, error)
        self._loop.stop()


def _backend_of(config: RemoteConfig) -> Backend:
    """Return the backend for the URL."""
    try:
        with from_extra("remote", "A remote"):
            if config.scheme in REDIS_SCHEMES:
                from cachecraft_rag.store.remote.redis_backend import RedisBackend

                return RedisBackend(config)
            from cachecraft_rag.store.remote.object_backend import ObjectBackend

            return ObjectBackend(config)
    except ConfigError:  # our own words, with no secret in them
        raise
    except (ValueError, TypeError) as error:
        why = config.hide(error)
    # Outside the handler: the library's message stays out of the chain of causes.
    raise ConfigError(f"The remote {config.shown} cannot be used: {why}")
