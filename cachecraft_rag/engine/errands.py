"""Work that may come up while an object is being deleted, done by a thread of its own.

Python may collect garbage at almost any moment, also in a thread that holds one of our locks. What runs then, such as
the `finally` of an answer nobody reads any more, must take no lock: it would wait for itself.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue

logger = logging.getLogger("cachecraft_rag")

Job = Callable[[], object]
_LOOK_S = 0.2  # how often who waits sees whether the thread still runs


class Errands:
    """Jobs in order, in the background. They end with `close`, or when nobody has this object any more."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # its `put` may be interrupted by another `put`
        self._pid = os.getpid()
        self._thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def add(self, job: Job) -> None:
        """Have a job done. Takes no lock and never waits, so finalisers may call this."""
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait until everything added so far is done; after `close`, do it here. No finaliser may call this."""
        if os.getpid() != self._pid:  # a fork: neither the thread nor what it would be done to is here
            return
        done = threading.Event()
        self._jobs.put(done.set)
        while not done.wait(_LOOK_S if self._thread.is_alive() else 0.0):
            if not self._thread.is_alive():
                _run_what_is_left(self._jobs)

    def close(self) -> None:
        """Do what was added and end the thread."""
        if os.getpid() == self._pid:
            self._jobs.put(None)
            self._thread.join()


def _run(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        _do(job)
        del job  # while the thread waits, nobody's tensors wait with it


def _run_what_is_left(jobs: SimpleQueue[Job | None]) -> None:
    while True:
        try:
            job = jobs.get_nowait()
        except Empty:
            return
        if job is not None:
            _do(job)


def _do(job: Job) -> None:
    try:
        job()
    except Exception:
        logger.exception("What an answer left behind could not be put away")
