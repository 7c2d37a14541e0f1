"""Background jobs that a finaliser may start: work that becomes necessary while an object is being deleted.

Python may run the garbage collector at almost any point, also in a thread that holds one of our locks. Code that runs
then, such as the `finally` of an abandoned answer, must not take a lock: it might wait for its own thread.
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
_POLL_S = 0.2  # how often `wait` checks that the thread is still alive


class BackgroundJobs:
    """A thread that runs jobs in order, until `close` or until this object is deleted. Exceptions are logged."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # its `put` is reentrant; that of `Queue` is not
        self._pid = os.getpid()
        self._thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def add(self, job: Job) -> None:
        """Queue a job. Takes no lock and never waits, so finalisers may call this."""
        self._jobs.put(job)

    def wait(self) -> None:
        """Wait until all jobs added so far are done; after `close`, run them here. Finalisers must not call this."""
        if os.getpid() != self._pid:  # after a fork neither the thread nor the objects of its jobs exist here
            return
        done = threading.Event()
        self._jobs.put(done.set)
        while not done.wait(_POLL_S if self._thread.is_alive() else 0.0):
            if not self._thread.is_alive():
                _run_remaining(self._jobs)

    def close(self) -> None:
        """Run the jobs added so far and end the thread."""
        if os.getpid() == self._pid:
            self._jobs.put(None)
            self._thread.join()


def _run(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        _do(job)
        del job  # or an idle thread would keep the job's tensors alive


def _run_remaining(jobs: SimpleQueue[Job | None]) -> None:
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
    except Exception:  # a mistake of ours in one job must not keep the others from being done
        logger.exception("A background job failed")
