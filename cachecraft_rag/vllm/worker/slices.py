"""The time for which prompts are filled in each step, before vLLM computes its own requests.

While vLLM has requests, fillings get several times as long as a step of its own takes, so that a prompt of new
documents is filled nearly as fast as vLLM computes it in one step; other users wait for a part of that at a time. A
fixed time would be too short for a slow model, and would stop the others for too long with a fast one.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

# Times as long as a step of vLLM's own that fillings may take of each step.
_SHARE = 8.0
_SHORTEST_S = 0.05
_LONGEST_S = 1.0  # also if vLLM's own steps are prefills
_STEPS = 15  # steps of vLLM's own that are remembered


class Slices:
    """Share of each step in which prompts are filled, from how long vLLM's own steps have taken."""

    def __init__(self) -> None:
        self._own_s: deque[float] = deque(maxlen=_STEPS)
        self._ended: float | None = None

    def begin(self) -> None:
        """Note that a step begins: the time since `end` is that of vLLM's own part of the step before."""
        if self._ended is not None:
            self._own_s.append(time.perf_counter() - self._ended)
        self._ended = None

    def end(self, *, is_own: bool) -> None:
        """Note that our part of a step has ended; `is_own` if it was nothing and vLLM computes: its time is measured.

        On a GPU vLLM's part also waits for ours, so it tells nothing after a filling.
        """
        self._ended = time.perf_counter() if is_own else None

    def seconds(self, *, otherwise: float) -> float:
        """Return the time for fillings while vLLM has requests; `otherwise` until a step of its own was measured."""
        if not self._own_s:
            return otherwise
        return min(max(_SHARE * statistics.median(self._own_s), _SHORTEST_S), _LONGEST_S)
