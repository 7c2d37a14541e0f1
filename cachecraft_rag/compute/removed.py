"""What was removed while a request was on its way."""

from __future__ import annotations

from collections.abc import Iterable


class Removed:
    """The chunks that were removed since something began that may capture them; see `WriteBackQueue.follow`."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def __contains__(self, chunk_id: str) -> bool:
        return chunk_id in self._ids

    def add(self, chunk_ids: Iterable[str]) -> None:
        """These were removed."""
        self._ids.update(chunk_ids)
