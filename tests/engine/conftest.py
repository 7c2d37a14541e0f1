"""What the engine's tests of threads share: exceptions thrown into a thread at any moment."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator

import pytest


class Interruption(Exception):
    """What the tests throw into a thread at any moment."""


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
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Interruption))
