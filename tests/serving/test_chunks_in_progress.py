"""Chunk-caches in progress: who waits for which, and what ends the wait."""

from __future__ import annotations

from typing import Any

import pytest

from cachecraft_rag.serving.chunks_in_progress import (
    ChunksInProgress,
    ExpectedCaptures,
    ExpectedVariant,
    WantedChunks,
)

KETTLE = ExpectedVariant("kettle", ("system",), None)
TOASTER = ExpectedVariant("toaster", ("system", "kettle"), None)
OWNER = ("tenant", "adapter")
WANTED = WantedChunks(OWNER, [KETTLE, TOASTER], "anywhere")


def in_progress(captured: set[str]) -> ChunksInProgress:
    return ChunksInProgress(lambda _: captured)


def test_a_chunk_is_waited_for_while_it_is_computed_and_captured_and_then_no_longer() -> None:
    captured: set[str] = set()
    chunks = in_progress(captured)
    captures = ExpectedCaptures(OWNER, [KETTLE])
    assert chunks.computing(WANTED) == chunks.capturing(WANTED) == []
    chunks.announce(captures)
    assert (chunks.computing(WANTED), chunks.capturing(WANTED)) == ([KETTLE], [])
    captured.add("kettle")
    captures.computed = True
    chunks.forget_captured()
    assert (chunks.computing(WANTED), chunks.capturing(WANTED)) == ([], [KETTLE])
    captured.clear()
    chunks.forget_captured()
    assert chunks.computing(WANTED) == chunks.capturing(WANTED) == []
    assert not chunks.withdraw(captures)


@pytest.mark.parametrize(
    "ending", [lambda chunks, one: chunks.withdraw(one), lambda _, one: setattr(one, "computed", 1)]
)
def test_a_request_that_fails_is_not_waited_for(ending: Any) -> None:
    chunks = in_progress(set())
    captures = ExpectedCaptures(OWNER, [KETTLE])
    chunks.announce(captures)
    ending(chunks, captures)
    assert chunks.computing(WANTED) == chunks.capturing(WANTED) == []


@pytest.mark.parametrize(
    "wanted",
    [
        WantedChunks(("another tenant", "adapter"), [KETTLE], "anywhere", "key"),
        WantedChunks(("tenant", None), [KETTLE], "anywhere", "key"),
        WantedChunks(OWNER, [ExpectedVariant("kettle", ("other",), "bob")], "prefix"),
        WantedChunks(OWNER, [ExpectedVariant("jug", ("system",), "bob")], "anywhere"),
    ],
)
def test_chunks_that_a_request_may_not_use_are_not_waited_for(wanted: WantedChunks) -> None:
    chunks = in_progress({"kettle"})
    captures = ExpectedCaptures(OWNER, [KETTLE], prefix_key="key")
    chunks.announce(captures)
    assert chunks.computing(wanted) == chunks.capturing(wanted) == []
    captures.computed = True
    assert chunks.capturing(wanted) == []


def test_captures_that_no_request_has_announced_are_waited_for() -> None:
    chunks = in_progress({"kettle"})
    chunks.announce(ExpectedCaptures(OWNER, [TOASTER], computed=True))
    assert chunks.capturing(WANTED) == [KETTLE]


def test_work_in_idle_time_is_waited_for_only_while_it_is_captured() -> None:
    captured: set[str] = set()
    chunks = in_progress(captured)
    chunks.announce(ExpectedCaptures(OWNER, [KETTLE], prefix_key="key", idle=True))
    wanted = WantedChunks(OWNER, [KETTLE], "anywhere", "key")
    assert chunks.computing(wanted) == chunks.capturing(wanted) == []
    captured.add("kettle")
    assert chunks.capturing(wanted) == [KETTLE]


def test_a_request_with_the_same_chunks_leaves_all_of_them_in_the_prefix_cache() -> None:
    chunks = in_progress(set())
    wanted = WantedChunks(OWNER, [KETTLE, TOASTER], "prefix", "key")
    captures = ExpectedCaptures(OWNER, prefix_key="key")
    chunks.announce(captures)
    assert chunks.computing(wanted) == [KETTLE, TOASTER]
    captures.computed = True
    assert chunks.computing(wanted) == []


def test_captures_that_are_held_back_are_handed_over_once_to_those_who_want_them() -> None:
    captured: set[str] = set()
    chunks = in_progress(captured)
    captures = ExpectedCaptures(
        OWNER, [KETTLE], computed=True, submit=lambda: captured.add("kettle")
    )
    chunks.announce(captures)
    chunks.forget_captured()
    assert chunks.held_back(WantedChunks(OWNER, [TOASTER], "anywhere")) == []
    assert chunks.held_back(WANTED) == [captures]
    captures.hand_over()
    assert chunks.held_back(WANTED) == []
    assert chunks.capturing(WANTED) == [KETTLE]
