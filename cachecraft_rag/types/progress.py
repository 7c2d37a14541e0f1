"""Progress of a long operation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a long operation, passed to its `progress` callback.

    done, total  steps finished, and steps in all
    what         the step, in words for a progress bar
    """

    done: int
    total: int
    what: str
