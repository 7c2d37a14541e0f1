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
        worker.submit(lambda number=number: ran.append((number, threading.current_thread().name)), ended=ignore)
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
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
