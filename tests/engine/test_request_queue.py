"""The queue in front of the engine: who has the turn, who waits, who is turned away."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cachecraft_rag.engine.request_queue import ENTERED, LeftQueue, QueueCounts, RequestQueue
from cachecraft_rag.errors import BusyError, WaitTimeoutError
from tests.engine.conftest import Interruption, interrupt


def until(holds: Callable[[], bool]) -> None:
    """Wait for something another thread does."""
    give_up = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def in_threads(*works: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


@contextmanager
def one_after_the_other(queue: RequestQueue, take: Callable[[int], None], count: int) -> Iterator[None]:
    """Has the turn in the block, while so many wait in threads that entered in order; all have ended behind it."""
    threads = []
    with queue.enter():
        for number in range(count):
            threads += in_threads(lambda number=number: take(number))
            until(lambda number=number: queue.counts().waiting == number + 1)
        yield
    queue.hand_on()
    for thread in threads:
        thread.join(60)


def test_turns_go_in_the_order_of_entering() -> None:
    queue, order = RequestQueue(8), list[int]()

    def take(number: int) -> None:
        with queue.enter():
            order.append(number)
        queue.hand_on()

    with one_after_the_other(queue, take, 8):
        assert order == []
    assert order == list(range(8))
    assert queue.counts() == QueueCounts(0, 0, 0)


@pytest.mark.parametrize("most", [0, 2])
def test_who_finds_it_full_is_turned_away(most: int) -> None:
    queue = RequestQueue(most)
    with queue.enter():
        waiting = [queue.enter() for _ in range(most)]
        with pytest.raises(BusyError, match=rf"^{most} requests are waiting already; .*max_waiting"):
            queue.enter()
        assert queue.counts() == QueueCounts(most, 1, 0)
        for place in waiting:
            place.leave()
        if most:
            queue.enter()
    with queue.enter():
        assert queue.counts() == QueueCounts(0, 1, 0)


def test_who_waits_too_long_is_told_so_and_leaves() -> None:
    queue = RequestQueue(3, timeout_s=0.01)
    with queue.enter():
        place = queue.enter()
        with pytest.raises(WaitTimeoutError, match=r"longer than 0.01 s .*wait_timeout_s"), place:
            pytest.fail("another has the turn")
        assert queue.counts() == QueueCounts(0, 0, 1)
    with queue.enter():  # nobody before it: no wait, however late it is
        pass


def test_who_leaves_waits_no_longer_and_holds_nobody_up() -> None:
    queue, left, got = RequestQueue(3), threading.Event(), threading.Event()
    place, other = queue.enter(), queue.enter()
    third = queue.enter()

    def leave() -> None:
        with pytest.raises(LeftQueue), other:
            pytest.fail("it had left")
        left.set()

    def take() -> None:
        with third:
            got.set()

    with place:
        leaving, taking = in_threads(leave, take)
        until(lambda: other.present and third.present)
        other.leave()
        assert left.wait(60)
        assert queue.counts().waiting == 1
        place.leave()  # without effect: it has its turn
        assert not got.is_set()
    queue.hand_on()
    assert got.wait(60)
    leaving.join(60)
    taking.join(60)
    gone = queue.enter()
    gone.leave()
    with pytest.raises(LeftQueue), gone:  # before its thread came
        pytest.fail("it had left")


def test_who_has_no_thread_yet_lets_others_pass_and_keeps_its_rank() -> None:
    queue, order = RequestQueue(3), list[str]()
    late, holder = queue.enter(), queue.enter()

    def take(name: str) -> None:
        ENTERED.set(late if name == "late" else None)
        with queue.place():
            order.append(name)
        queue.hand_on()

    with holder:  # though the other one came first
        threads = in_threads(lambda: take("after"))
        until(lambda: queue.counts().waiting == 2)
        threads += in_threads(lambda: take("late"))
        until(lambda: late.present)
    queue.hand_on()
    for thread in threads:
        thread.join(60)
    assert order == ["late", "after"]
    ENTERED.set(late)
    assert queue.place() is not late  # a place serves once
    ENTERED.set(None)


def test_a_turn_can_end_before_its_block() -> None:
    queue = RequestQueue(1)
    place, got = queue.enter(), threading.Event()

    def take() -> None:
        with queue.enter():
            got.set()

    with place:
        (thread,) = in_threads(take)
        until(lambda: queue.counts().waiting == 1)
        place.end_turn()
        place.end_turn()
        assert got.wait(60)
    thread.join(60)
    assert queue.counts().waiting == 0


def test_only_the_next_one_prepares_and_only_once() -> None:
    queue, prepared, order = RequestQueue(3), list[int](), list[int]()

    def take(number: int) -> None:
        place = queue.enter()
        place.when_next = lambda: prepared.append(number)
        with place:
            order.append(number)
            until(lambda: len(prepared) == min(number + 2, 3))  # while this one has the turn, the next prepares
        queue.hand_on()

    with one_after_the_other(queue, take, 3):
        until(lambda: prepared == [0])
    assert (prepared, order) == ([0, 1, 2], [0, 1, 2])


def test_a_place_that_is_dropped_is_given_up() -> None:
    queue = RequestQueue(0)
    for _ in range(3):
        queue.enter()  # whoever entered was interrupted before it could keep the place
    assert queue.counts() == QueueCounts(0, 0, 0)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("count", [1, 3])
def test_interruptions_at_any_moment_lose_no_turn(count: int) -> None:
    queue, stop, caught, turns = RequestQueue(8), threading.Event(), 0, 0

    def work() -> None:
        nonlocal turns
        while not stop.is_set():
            with queue.enter():
                turns += 1
            queue.hand_on()

    def guarded() -> None:
        nonlocal caught
        while not stop.is_set():
            try:
                work()
            except Interruption:
                caught += 1

    def doubly() -> None:  # also between two blocks of `guarded`
        while not stop.is_set():
            try:
                guarded()
            except Interruption:
                continue

    threads = in_threads(*[doubly] * count)
    dice, interval = random.Random(1), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        deadline = time.monotonic() + 300  # a busy machine takes its time; a turn that is lost stops the count
        while caught < 500 and time.monotonic() < deadline:
            interrupt(threads[dice.randrange(count)])
            time.sleep(dice.random() * 2e-4)
    finally:
        sys.setswitchinterval(interval)
    before = turns
    until(lambda: turns > before + count)  # nobody has the turn for good
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert caught >= 500
    assert queue.counts() == QueueCounts(0, 0, 0)
    with queue.enter():
        pass
