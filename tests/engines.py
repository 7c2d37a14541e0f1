"""Shared by the engine's tests of threads: engines over one folder, and exceptions thrown into a thread."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk

SHORT = SamplingParams(max_new_tokens=8)
# Takes what is stored also where computing is faster, and leaves no choice to clocks.
CONFIG = ReuseConfig(method=ReuseMethod(alpha=0.3, loading="layerwise"))


class Interruption(Exception):
    """Thrown by tests into a thread at any moment."""


@pytest.fixture
def untraced() -> Iterator[None]:
    """No coverage while exceptions are thrown into threads.

    They would leave the tracer's own locks locked, and Python 3.11 spins in a traced thread while another one, blocked
    in C, has an exception waiting for it.
    """
    main, others = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    yield
    threading.settrace(others)
    sys.settrace(main)


def interrupt(thread: threading.Thread) -> None:
    """Raise `Interruption` in a thread between two of its next instructions, if it was started."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(Interruption)
        )


def until(holds: Callable[[], bool]) -> None:
    """Wait for something another thread does."""
    give_up = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.001)


@pytest.fixture
def make_engine(
    decoder_of_letters: Callable[..., Any], tmp_path: Path
) -> Iterator[Callable[..., Engine]]:
    """Makes engines over one folder, or the `folder` that is named; `host_bytes` of the store."""
    opened: list[Any] = []

    def make(
        *,
        decoder: Any = None,
        host_bytes: int = 1 << 30,
        folder: str = "caches",
        **settings: Any,
    ) -> Engine:
        opened.append(ChunkCacheStore.open(tmp_path / folder, host_bytes=host_bytes))
        given = {"config": CONFIG, "new_variants": "off"} | settings
        opened.append(Engine(decoder or decoder_of_letters(), opened[-1], **given))
        made: Engine = opened[-1]
        return made

    yield make
    for one in reversed(opened):
        one.close()


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


class Asking:
    """A question in a separate thread."""

    def __init__(
        self,
        engine: Engine,
        chunks: list[Chunk],
        question: str = "How do I descale it?",
        **how: Any,
    ) -> None:
        self.error: BaseException | None = None
        self.answer = engine.stream(question, chunks, **({"sampling": SHORT} | how))
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for _ in self.answer:
                pass
        except Exception as error:  # noqa: BLE001  # whatever it is, the test looks at it
            self.error = error

    def ended(self) -> Generation:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.answer

    @property
    def outcomes(self) -> list[str]:
        return [chunk.outcome for chunk in self.ended().stats.chunks]


class Turn:
    """Holds the turn of an engine: `with Turn(engine) as turn:` its first question stays in its look-up."""

    def __init__(self, engine: Engine, chunks: list[Chunk], **how: Any) -> None:
        self._engine, self._gate, self._inside = engine, threading.Event(), threading.Event()
        look_up = engine._answering.look_up

        def slowly(*given: Any, **options: Any) -> Any:
            if not self._inside.is_set():
                self._inside.set()
                assert self._gate.wait(60)
            return look_up(*given, **options)

        engine._answering.look_up = slowly
        self.asking = Asking(engine, chunks, **how)

    def __enter__(self) -> Asking:
        assert self._inside.wait(60)
        return self.asking

    def __exit__(self, *_: object) -> None:
        self._gate.set()


def waiting(engine: Engine, count: int) -> None:
    """Wait until so many requests wait for their turn."""
    until(lambda: len(engine._admission) == count)
