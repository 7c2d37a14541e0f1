"""One thread that runs jobs in the order in which they were handed over."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

logger = logging.getLogger("cachecraft_rag.store")
T = TypeVar("T")


class WorkerEndedError(RuntimeError):
    """The thread has ended and takes no further job."""


class SerialWorker:
    """A thread for jobs, started with the first one. Ctrl-C at any moment of `submit` leaves nothing locked.

    Rejected: `concurrent.futures.ThreadPoolExecutor`. Its semaphore is locked in Python code, and an interrupt there
    leaves it locked: in a test of 2,000 interrupts a later `submit` waited for ever. Here the queue and the guard are
    locked in C, where no interrupt is raised.

    At the end of the interpreter it finishes its jobs, so a program that forgets `shut_down` loses none.
    """

    def __init__(self, name: str) -> None:
        """`name` is the thread's."""
        self._name = name
        # None: end when the queue is empty
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._guard = threading.Lock()  # guards the two attributes that follow
        self._thread: threading.Thread | None = None
        self._ended = False
        # Registered here and not by the thread: at the end of the interpreter nothing can be registered any more.
        self._exit_hook = partial(_end_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._exit_hook)

    def submit(self, job: Callable[[], T], *, ended: Callable[[Future[T]], object]) -> Future[T]:
        """Hand a job to the thread; return the future of its result, which also holds any exception of the job.

        If the system has no room for a thread, the job and all that wait run here. `ended` is called in the thread with
        the future once it is done or cancelled: `Future.add_done_callback` would lock the future in Python code of the
        caller's thread. Raises WorkerEndedError if the thread has ended.
        """
        future: Future[T] = Future()
        with self._guard:
            if self._ended:
                raise WorkerEndedError("the thread has ended")
            self._jobs.put(partial(_fulfil, future, job, ended))
            is_running = self._thread is not None
        if not is_running:
            self._start()
        return future

    def end(self) -> None:
        """End the thread once its jobs are done, without waiting. Takes no lock: finalizers may call this."""
        self._jobs.put(None)

    def shut_down(self) -> None:
        """Finish all jobs, and end the thread; wait for both without limit. A second call does nothing.

        Jobs that wait for a thread which could not start run here. A call in the thread itself does not wait.
        """
        self.end()
        # A thread whose start was interrupted may still begin; the first one does the jobs.
        self._work()
        with self._guard:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self) -> None:
        # The thread sets `_thread` itself, because an interruption here may fall before or after its start.
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        # the system has no room for a thread, or the interpreter is shutting down
        except RuntimeError:
            self._drain()

    def _drain(self) -> None:
        """Do the waiting jobs in the caller's thread."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return
            # The end, which the thread or `shut_down` is to see.
            if job is None:
                self._jobs.put(None)
                return
            job()

    def _work(self) -> None:
        """Do all jobs until the end is asked for, unless another thread does them already."""
        with self._guard:
            if self._thread is not None or self._ended:
                return
            self._thread = threading.current_thread()
        is_ending = False
        while True:
            job = self._jobs.get()
            if job is None:
                is_ending = True
            else:
                job()
            del job  # or an idle thread would keep its arrays alive
            with self._guard:
                if is_ending and self._jobs.empty():
                    self._ended = True
                    break
        atexit.unregister(self._exit_hook)


def _end_at_exit(worker: weakref.ref[SerialWorker], pid: int) -> None:
    """Finish the jobs of a worker, unless this is a fork, where it has no thread."""
    alive = worker()
    if alive is not None and os.getpid() == pid:
        alive.shut_down()


def _fulfil(future: Future[T], job: Callable[[], T], ended: Callable[[Future[T]], object]) -> None:
    """Do a job, unless it was cancelled, and pass its result or its error on."""
    if future.set_running_or_notify_cancel():
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001  # it is raised where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(result)
    try:
        ended(future)
    except Exception:  # a mistake of ours, which must not end the thread
        logger.exception("What follows from a background job has failed")
