"""One thread that runs jobs in the order in which they were handed over."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class SerialWorker:
    """A thread for jobs, started with the first one. Ctrl-C at any moment of `submit` leaves nothing locked.

    Rejected: `concurrent.futures.ThreadPoolExecutor`. Its semaphore is locked in Python code, and an interrupt there
    leaves it locked: after some hundred interrupts the next `submit` waited for ever. Here the queue and the guard are
    locked in C, where no interrupt is raised.

    At the end of the interpreter it finishes its jobs, so a program that forgets `shut_down` loses none.
    """

    def __init__(self, name: str) -> None:
        """`name` is the thread's."""
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: end when the queue is empty
        self._guard = threading.Lock()  # guards the two attributes that follow
        self._thread: threading.Thread | None = None
        self._ended = False

    def submit(self, job: Callable[[], T], *, ended: Callable[[Future[T]], object]) -> Future[T]:
        """Hand a job to the thread.

        Args:
            ended: called in the thread with the future once it is done. `Future.add_done_callback` would lock the
                future in Python code of the caller's thread.

        Raises:
            RuntimeError: the thread has ended.
        """
        future: Future[T] = Future()
        with self._guard:
            if self._ended:
                raise RuntimeError("the thread has ended")
            self._jobs.put(partial(_fulfil, future, job, ended))
            is_running = self._thread is not None
        if not is_running:
            # The thread sets `_thread` itself, because an interruption here may fall before or after its start.
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def end(self) -> None:
        """End the thread once its jobs are done, without waiting. Takes no lock: finalizers may call this."""
        self._jobs.put(None)

    def shut_down(self) -> None:
        """Finish all jobs, and end the thread."""
        self.end()
        with self._guard:
            thread = self._thread
            if thread is None and self._jobs.qsize() == 1:  # no job was ever handed over
                self._ended = True
                return
        if thread is None:  # its start was interrupted, and jobs are waiting
            self._work()
        elif thread is not threading.current_thread():
            thread.join()

    def _at_exit(self, pid: int) -> None:
        if os.getpid() == pid:  # in a fork there is no thread
            self.shut_down()

    def _work(self) -> None:
        with self._guard:
            if self._thread is not None or self._ended:  # the start was interrupted, and a second thread has begun
                return
            self._thread = threading.current_thread()
        at_exit = partial(self._at_exit, os.getpid())
        atexit.register(at_exit)
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
        atexit.unregister(at_exit)


def _fulfil(future: Future[T], job: Callable[[], T], ended: Callable[[Future[T]], object]) -> None:
    """Do a job, unless it was cancelled, and pass its result or its error on."""
    if future.set_running_or_notify_cancel():
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001  # it is raised where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(result)
    ended(future)
