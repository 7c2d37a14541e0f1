"""The conversations of `streamlit_app.py`.

A page's address holds a random key (`?c=…`) of its conversation, which the server keeps in memory. So a reload, a
bookmark or a second tab shows it again; after a restart of the server it is gone.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cachecraft_rag import Answer

MOST_CONVERSATIONS = 200  # the longest unused goes first


@dataclass
class Turn:
    """A question and its answer, None if it was interrupted before its first token.

    arguments    repeat the call
    full_ttft_s  seconds to the first token without reuse; None until it is measured
    whole        the answer has ended, at its end or where it should
    compare      the same prompt is still to be timed without reuse
    """

    question: str
    arguments: dict[str, Any]
    answer: Answer | None = None
    full_ttft_s: float | None = None
    whole: bool = False
    compare: bool = False


class Activity:
    """Everything that keeps the processor of this server busy, so that a baseline is timed alone or discarded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._begun = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the block as activity."""
        with self._lock:
            self._running += 1
            self._begun += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def idle_mark(self) -> int | None:
        """Return a mark for `idle_since`; None if something runs now."""
        with self._lock:
            return None if self._running else self._begun

    def idle_since(self, mark: int) -> bool:
        """Return whether nothing has run since the mark."""
        with self._lock:
            return self._begun == mark


class Conversations:
    """The turns of each conversation by its key; a key that this object has not made leads nowhere.

    An owner (the name of a visitor who has logged in, or "") sees only conversations of that owner.
    """

    def __init__(self, most: int = MOST_CONVERSATIONS) -> None:
        self._most = most
        self._turns: OrderedDict[tuple[str, str], list[Turn]] = OrderedDict()
        self._lock = threading.Lock()

    def new(self, owner: str = "") -> str:
        """The key of a new, empty conversation."""
        key = uuid.uuid4().hex
        with self._lock:
            self._turns[owner, key] = []
            while len(self._turns) > self._most:
                self._turns.popitem(last=False)
        return key

    def find(self, key: str, owner: str = "") -> list[Turn] | None:
        """The turns of a conversation, to be appended to; None for an unknown key."""
        with self._lock:
            if (owner, key) in self._turns:
                self._turns.move_to_end((owner, key))
            return self._turns.get((owner, key))
