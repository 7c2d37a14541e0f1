"""Rows: which positions are computed and why, without ever changing an array that somebody holds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cachecraft_rag.compute.rows import RowReason, Rows

BOUNDS = [0, 3, 7, 7, 12]  # one segment is empty
ARRAYS = ("segment", "reason", "done")


def rows() -> Rows:
    return Rows.of(BOUNDS, new=range(7, 12), recomputed=[1, 4, 5])


def copies(found: Rows) -> dict[str, np.ndarray]:
    return {name: getattr(found, name).copy() for name in ARRAYS}


def test_each_position_has_its_segment_and_its_reason() -> None:
    found = rows()
    assert found.bounds == tuple(BOUNDS)
    assert found.segment.tolist() == [0] * 3 + [1] * 4 + [3] * 5
    assert found.reason.tolist() == [0, 2, 0, 0, 2, 2, 0, 1, 1, 1, 1, 1]
    assert not found.done.any()
    assert [found.segment.dtype, found.reason.dtype, found.done.dtype] == [
        np.int64,
        np.uint8,
        np.bool_,
    ]


def test_a_position_that_is_new_and_recomputed_is_new() -> None:
    assert Rows.of([0, 3], new=[1], recomputed=[0, 1]).reason.tolist() == [
        RowReason.RECOMPUTED,
        RowReason.NEW,
        0,
    ]


def test_the_caller_may_go_on_changing_the_bounds_it_gave() -> None:
    bounds = [0, 3]
    found = Rows.of(bounds)
    bounds.append(9)
    assert found.bounds == (0, 3)


@pytest.mark.parametrize(
    "given", [[1, 2], (1, 2), range(1, 3), {1, 2}, np.array([1, 2]), iter([1, 2])], ids=type
)
def test_positions_may_be_given_in_any_form(given: object) -> None:
    assert rows().mark(given, RowReason.COMPUTED_INSTEAD).reason[:4].tolist() == [0, 3, 3, 0]  # type: ignore[arg-type]


def test_marking_and_finishing_make_new_rows_and_leave_the_old_as_they_are() -> None:
    old = rows()
    before = copies(old)
    marked = old.mark([0, 1], RowReason.COMPUTED_INSTEAD)
    finished = marked.finish([1, 7])
    for name, array in before.items():
        assert np.array_equal(getattr(old, name), array), name
    assert marked.reason.tolist() == [3, 3, *old.reason[2:].tolist()]
    assert not marked.done.any()
    assert np.flatnonzero(finished.done).tolist() == [1, 7]
    assert finished.reason.tolist() == marked.reason.tolist()


def test_nothing_of_rows_can_be_replaced() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows().done = np.ones(12, bool)  # type: ignore[misc]


def test_marking_nothing_changes_nothing() -> None:
    old = rows()
    for found in (old.mark([], RowReason.NEW), old.finish([])):
        assert all(np.array_equal(getattr(found, name), getattr(old, name)) for name in ARRAYS)


def test_open_are_those_to_be_computed_that_are_not_done() -> None:
    found = rows()
    assert found.open().tolist() == [1, 4, 5, 7, 8, 9, 10, 11]
    assert found.open(below=5).tolist() == [1, 4]
    assert found.open(below=0).tolist() == []
    assert found.finish([1, 5, 11]).open().tolist() == [4, 7, 8, 9, 10]
    # stored, and never to be computed
    assert found.finish([2]).open().tolist() == found.open().tolist()
    assert found.mark([4], RowReason.STORED).open(below=7).tolist() == [1, 5]
    assert found.mark([0], RowReason.COMPUTED_INSTEAD).open(below=2).tolist() == [0, 1]
    assert found.open().dtype == np.int64


def test_spans_and_offsets_are_those_of_a_segment() -> None:
    found = rows().mark([3], RowReason.COMPUTED_INSTEAD)
    assert [found.span(segment) for segment in range(4)] == [
        slice(0, 3),
        slice(3, 7),
        slice(7, 7),
        slice(7, 12),
    ]
    assert found.offsets(1, RowReason.RECOMPUTED).tolist() == [1, 2]
    assert found.offsets(1, RowReason.COMPUTED_INSTEAD).tolist() == [0]
    assert found.offsets(1, RowReason.RECOMPUTED, RowReason.COMPUTED_INSTEAD).tolist() == [0, 1, 2]
    assert found.offsets(1, RowReason.STORED).tolist() == [3]
    assert found.offsets(1).tolist() == []
    assert found.offsets(2, *RowReason).tolist() == []
    assert found.offsets(3, RowReason.NEW).tolist() == [0, 1, 2, 3, 4]


def test_rows_are_compared_by_identity() -> None:  # arrays have no single truth value
    assert rows() != rows()
