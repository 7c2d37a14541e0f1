"""The lock that is handed on in the order of asking."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from cachecraft_rag.engine.scheduling import FairLock, Ticket
from cachecraft_rag.store.loading.pending import PendingLoads
from cachecraft_rag.store.loading.rate import Meter
from tests.engine.conftest import Interruption, interrupt


def in_line(lock: FairLock) -> Iterator[Ticket]:
    """Tickets that have not left, the last one first."""
    ticket = lock._last
    while ticket is not None:
        if not ticket.gone:
            yield ticket
        ticket = ticket.before


def held(lock: FairLock) -> bool:
    """Whether somebody has it or waits for it."""
    return any(in_line(lock))


def waiting(lock: FairLock, count: int) -> bool:
    """Whether so many threads stand in line."""
    return sum(ticket.before is not None for ticket in in_line(lock)) == count


def until(holds: Callable[[], bool]) -> None:
    """Wait for something another thread does."""
    give_up = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def test_first_come_first_served() -> None:
    lock, order = FairLock(), list[int]()

    def take(number: int) -> None:
        with lock.take():
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    with lock.take():
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
            with lock.take():
                turns.append("loop")
                until(lambda: waiting(lock, 1) or stop.is_set())  # whoever stands in line now is next

    looping = threading.Thread(target=loop)
    looping.start()
    for _ in range(5):
        until(lambda: turns[-1:] == ["loop"])
        with lock.take():
            turns.append("other")
    stop.set()
    looping.join(60)
    assert turns[:10] == ["loop", "other"] * 5


def test_never_two_at_once() -> None:
    lock, inside, worst = FairLock(), 0, 0

    def work() -> None:
        nonlocal inside, worst
        for _ in range(200):
            with lock.take():
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
    with pytest.raises(ZeroDivisionError), lock.take():
        raise ZeroDivisionError
    with lock.take():
        pass


@pytest.mark.parametrize("behind", [0, 1])
def test_ctrl_c_while_waiting_gives_the_place_in_line_back(behind: int) -> None:
    lock, release, got = FairLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock.take():
            release.wait(60)

    def take() -> None:
        with lock.take():
            got.set()

    holder, taker = threading.Thread(target=hold), threading.Thread(target=take)
    main = threading.main_thread().ident
    holder.start()
    until(lambda: held(lock))

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
        with pytest.raises(KeyboardInterrupt), lock.take():
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
    assert not held(lock)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("contended", [False, True], ids=["alone", "in line"])
def test_interruptions_at_any_moment_lose_no_turn(contended: bool) -> None:
    lock, stop, caught, inside = FairLock(), threading.Event(), 0, 0

    def work() -> None:
        nonlocal caught, inside
        while not stop.is_set():
            try:
                while not stop.is_set():
                    with lock.take():
                        inside += 1
            except Interruption:
                caught += 1

    def guarded() -> None:
        while not stop.is_set():
            try:
                work()
            except Interruption:  # between two blocks of `work`
                continue

    threads = [threading.Thread(target=guarded, daemon=True) for _ in range(3 if contended else 1)]
    for thread in threads:
        thread.start()
    dice, interval = random.Random(1), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    deadline = time.monotonic() + 300  # a busy machine takes its time; a turn that is lost stops the count
    while caught < 1000 and time.monotonic() < deadline:
        interrupt(threads[dice.randrange(len(threads))])
        time.sleep(dice.random() * 2e-4)
    sys.setswitchinterval(interval)
    before = inside
    until(lambda: inside > before)  # nobody holds it for good
    stop.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert caught >= 1000
    assert not held(lock)
    with lock.take():
        assert held(lock)


@pytest.mark.usefixtures("untraced")
def test_ctrl_c_in_the_main_thread_loses_no_turn() -> None:
    """Signals, as a terminal sends them: a timer's, so that they come at any moment."""
    lock, caught, got = FairLock(), 0, 0
    dice = random.Random(1)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(3000):
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.random() * 1e-4 + 1e-6)  # once
                while True:
                    with lock.take():
                        got += 1
            except KeyboardInterrupt:
                caught += 1
            assert not held(lock)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert caught == 3000
    assert got > 0


@pytest.mark.usefixtures("untraced")
def test_who_leaves_early_lets_nobody_past_the_holder() -> None:
    lock, order = FairLock(), list[str]()

    def take(name: str) -> None:
        try:
            with lock.take():
                order.append(name)
        except Interruption:
            order.append(f"{name} left")

    threads = {
        name: threading.Thread(target=take, args=(name,), daemon=True)
        for name in ("first", "second", "third", "fourth")
    }
    with lock.take():
        for place, thread in enumerate(threads.values(), start=1):
            thread.start()
            until(lambda place=place: waiting(lock, place))
        for name in ("second", "third"):
            interrupt(threads[name])
        assert order == []
    for thread in threads.values():
        thread.join(10)
    # Blocked in C, they notice when it is their turn: the turn goes on, in the order of asking.
    assert [name for name in order if "left" not in name] == ["first", "fourth"]
    assert not held(lock)


@pytest.mark.usefixtures("untraced")
def test_interruptions_lose_no_lock_of_what_is_being_loaded() -> None:
    """Readers of all requests share threads: one that waits for a lost lock is lost to all."""
    loads, stop, dice = PendingLoads(2, [], Meter(None)), threading.Event(), random.Random(2)

    def work() -> None:
        while not stop.is_set():
            try:
                while not stop.is_set():
                    loads.incomplete()
            except Interruption:
                continue

    def guarded() -> None:
        while not stop.is_set():
            try:
                work()
            except Interruption:
                continue

    thread, interval = threading.Thread(target=guarded, daemon=True), sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(1e-5)
    for _ in range(5000):
        interrupt(thread)
        time.sleep(dice.random() * 2e-4)
    sys.setswitchinterval(interval)
    stop.set()
    thread.join(10)
    assert loads._changed.acquire(blocking=False)  # by this thread: another new one may get the dead one's number
    loads._changed.release()
