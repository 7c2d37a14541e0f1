"""The thread that writes: jobs in order, all of them, whatever interrupts their submission."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from cachecraft_rag.store.serial_worker import SerialWorker


def ignore(_: Future[object]) -> None:
    """Nothing follows from a job."""


def test_jobs_run_in_order_in_one_thread_and_pass_on_results_and_errors() -> None:
    worker = SerialWorker("worker")
    ran: list[tuple[int, str]] = []
    futures = [
        worker.submit(
            lambda number=number: ran.append((number, threading.current_thread().name)),
            ended=ignore,
        )
        for number in range(50)
    ]
    failing = worker.submit(lambda: 1 // 0, ended=ignore)
    assert worker.submit(lambda: "done", ended=ignore).result(60) == "done"
    assert ran == [(number, "worker") for number in range(50)]
    assert all(future.done() for future in futures)
    with pytest.raises(ZeroDivisionError):
        failing.result(0)
    worker.shut_down()


def test_shutting_down_finishes_what_waits_and_refuses_the_rest() -> None:
    worker = SerialWorker("worker")
    gate = threading.Event()
    worker.submit(gate.wait, ended=ignore)
    late = worker.submit(lambda: "late", ended=ignore)
    closing = threading.Thread(target=worker.shut_down)
    closing.start()
    assert not late.done()
    gate.set()
    closing.join(60)
    assert late.result(0) == "late"
    with pytest.raises(RuntimeError, match="ended"):
        worker.submit(lambda: None, ended=ignore)
    worker.shut_down()  # again


def test_a_worker_without_jobs_shuts_down_and_has_no_thread() -> None:
    before = threading.active_count()
    worker = SerialWorker("worker")
    assert threading.active_count() == before
    worker.shut_down()
    with pytest.raises(RuntimeError, match="ended"):
        worker.submit(lambda: None, ended=ignore)


def test_a_cancelled_job_does_not_run_and_is_reported() -> None:
    worker = SerialWorker("worker")
    gate = threading.Event()
    worker.submit(gate.wait, ended=ignore)
    reported: list[Future[object]] = []
    cancelled = worker.submit(lambda: pytest.fail("it ran"), ended=reported.append)
    assert cancelled.cancel()
    gate.set()
    worker.shut_down()
    assert reported == [cancelled]


def test_the_end_of_the_interpreter_waits_for_all_jobs() -> None:
    program = """
import time
from cachecraft_rag.store.serial_worker import SerialWorker
worker = SerialWorker("worker")
for number in range(5):
    worker.submit(lambda number=number: (time.sleep(0.02), print(number, flush=True)), ended=lambda _: None)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "1", "2", "3", "4"]


def test_an_interrupted_start_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SerialWorker("worker")

    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.submit(lambda: "first", ended=ignore)
    assert worker.submit(lambda: "second", ended=ignore).result(60) == "second"
    worker.shut_down()

    other = SerialWorker("worker")
    ran: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            other.submit(lambda: ran.append("first"), ended=ignore)
    other.shut_down()
    assert ran == ["first"]


def test_a_thread_that_cannot_start_costs_no_job_and_runs_none_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = SerialWorker("worker")

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        assert worker.submit(lambda: ran.append("first"), ended=ignore).done()
    worker.submit(lambda: ran.append("second"), ended=ignore).result(60)
    worker.shut_down()
    assert ran == ["first", "second"]


def test_a_mistake_in_what_follows_does_not_end_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = SerialWorker("worker")
    worker.submit(lambda: None, ended=lambda _: 1 // 0)
    assert worker.submit(lambda: "next", ended=ignore).result(60) == "next"
    worker.shut_down()
    assert "What follows from a background job has failed" in caplog.text


def test_jobs_of_exit_handlers_are_done() -> None:
    """Handlers run in the reverse order of their registration: this one runs before the worker's own."""
    program = """
import atexit
from cachecraft_rag.store.serial_worker import SerialWorker
worker = SerialWorker("worker")
atexit.register(lambda: worker.submit(lambda: print("done", flush=True), ended=lambda _: None))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["done"], done.stderr
