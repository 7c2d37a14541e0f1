"""Memory that is used again: never while somebody holds it, and never much more than is needed."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
import torch

from cachecraft_rag.kernels.memory import Recycler

LARGE = (2, 1024, 1024)


@pytest.fixture
def held_bytes() -> Iterator[Callable[[], int]]:
    """Bytes that NumPy has allocated since the test began and not freed."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


def test_a_block_is_used_again_when_nothing_is_left_of_its_tensor(
    held_bytes: Callable[[], int],
) -> None:
    memory = Recycler()
    first = memory.empty(LARGE, torch.float32).fill_(1.0)
    where, part = first.data_ptr(), first[1, :3]
    del first
    other = memory.empty(LARGE, torch.float32).fill_(2.0)  # a view of the first is still held
    assert other.data_ptr() != where
    assert part.eq(1.0).all()
    del part, other
    again = memory.empty((2, 1000, 1024), torch.bfloat16)
    assert again.nbytes <= held_bytes() < 2 * again.nbytes, (
        "no block for a tensor of less than half its size"
    )
    there = again.data_ptr()
    del again
    assert memory.empty((2, 900, 1024), torch.bfloat16).data_ptr() == there


def test_tensors_are_aligned_and_of_the_shape_asked_for() -> None:
    memory = Recycler()
    for _ in range(2):
        one = memory.empty((3, 5, 7), torch.float16)
        assert (one.shape, one.dtype, one.data_ptr() % 64) == ((3, 5, 7), torch.float16, 0)
        assert one.is_contiguous()
        del one


def test_threads_never_share_a_block() -> None:
    memory, wrong = Recycler(), list[int]()

    def use(number: int) -> None:
        for _ in range(300):
            one = memory.empty((64, 64), torch.int64).fill_(number)
            if not one.eq(number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
