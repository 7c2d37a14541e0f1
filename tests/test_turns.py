"""The lock that is handed on in the order of asking."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest

from cachecraft_rag.turns import FairLock


def waiting(lock: FairLock, count: int) -> bool:
    """Whether so many threads stand in line."""
    return len(lock._waiting) == count


def until(holds: Callable[[], bool]) -> None:
    """Wait for something another thread does."""
    give_up = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def test_first_come_first_served() -> None:
    lock, order = FairLock(), list[int]()

    def take(number: int) -> None:
        with lock:
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    with lock:
        for place, thread in enumerate(threads):
            thread.start()
            until(lambda place=place: waiting(lock, place + 1))
        assert order == []
    for thread in threads:
        thread.join(60)
    assert order == list(range(8))


def test_a_loop_that_takes_it_again_and_again_starves_nobody() -> None:
    lock, turns, stop = FairLock(), list[str](), threading.Event()

    def loop() -> None:
        while not stop.is_set():
            with lock:
                turns.append("loop")
                until(lambda: waiting(lock, 1) or stop.is_set())  # whoever stands in line now is next

    looping = threading.Thread(target=loop)
    looping.start()
    for _ in range(5):
        until(lambda: turns[-1:] == ["loop"])
        with lock:
            turns.append("other")
    stop.set()
    looping.join(60)
    assert turns[:10] == ["loop", "other"] * 5


def test_never_two_at_once() -> None:
    lock, inside, worst = FairLock(), 0, 0

    def work() -> None:
        nonlocal inside, worst
        for _ in range(200):
            with lock:
                inside += 1
                worst = max(worst, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert worst == 1


def test_an_exception_inside_hands_it_on() -> None:
    lock = FairLock()
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    with lock:
        pass


@pytest.mark.parametrize("behind", [0, 1])
def test_ctrl_c_while_waiting_gives_the_place_in_line_back(behind: int) -> None:
    lock, release, got = FairLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            release.wait(60)

    def take() -> None:
        with lock:
            got.set()

    holder, taker = threading.Thread(target=hold), threading.Thread(target=take)
    main = threading.main_thread().ident
    holder.start()
    until(lambda: lock._held)

    def interrupt() -> None:
        until(lambda: waiting(lock, 1))
        if behind:
            taker.start()
            until(lambda: waiting(lock, 2))
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt), lock:
            pytest.fail("the lock was held by another thread")
    finally:
        signal.signal(signal.SIGINT, before)
    if not behind:
        taker.start()
    until(lambda: waiting(lock, 1))
    release.set()
    assert got.wait(60)
    holder.join(10)
    taker.join(10)
    assert not lock._held
