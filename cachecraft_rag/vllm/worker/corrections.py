"""Corrections to vLLM's own statistics: which filled tokens were reused, and which requests are idle work.

vLLM counts each token that a connector announces as an external hit, at the time of its announcement. Ours fills the
whole prompt, also with what it computes, and knows only afterwards how much was reused. So vLLM's count of such a
look-up is taken back, and counted again with the report.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from cachecraft_rag.vllm.messages import Corrections
from cachecraft_rag.vllm.worker.interfaces import EngineRequest, PrefillStats


class CountReused(Protocol):
    """Function that counts reused tokens of a prompt."""

    def __call__(self, *, counted_from: int) -> int:
        """Return how many tokens from position `counted_from` on were reused."""


@dataclass(frozen=True)
class _LookUp:
    """A look-up that vLLM has counted.

    prompt   number of tokens of the prompt
    filled   number of tokens that are filled
    prefill  vLLM's statistics of the prompt, which it sends with the first token
    """

    prompt: int
    filled: int
    prefill: PrefillStats | None

    @property
    def queries(self) -> int:
        """Number of tokens that vLLM counts as looked up."""
        return self.prompt - self.local

    @property
    def local(self) -> int:
        """Number of first tokens that vLLM had in its own prefix cache."""
        return 0 if self.prefill is None else self.prefill.num_local_cached_tokens

    def correct(self, reused: int) -> None:
        """Say in vLLM's statistics of the prompt how many of its tokens were reused."""
        if self.prefill is not None:
            self.prefill.set(
                num_prompt_tokens=self.prompt,
                num_local_cached_tokens=self.local,
                num_external_cached_tokens=reused,
            )


class StatsCorrections:
    """Corrections of one scheduler as running totals, see `messages.Corrections`; `name` is the id of a request."""

    def __init__(self) -> None:
        self._look_ups: dict[str, _LookUp] = {}
        self._totals = Corrections(requests=0, queries=0, hits=0, idle_waiting=0)
        self._idle: set[str] = set()  # requests in idle time that have not begun to run

    def arrived_idle(self, name: str) -> None:
        """Note a request in idle time: it counts as `idle_waiting` until it is scheduled."""
        self._idle.add(name)

    def scheduled(self, names: Collection[str]) -> None:
        """Note the requests that vLLM computes in this step: they wait no longer."""
        self._idle.difference_update(names)

    def allocated(self, request: EngineRequest, tokens: int) -> None:
        """Note that a request is filled for the first time, and take back the look-up that vLLM counts now.

        `tokens` is the number of tokens to be filled.
        """
        look_up = _LookUp(request.num_prompt_tokens, tokens, request.prefill_stats)
        self._look_ups[request.request_id] = look_up
        self._totals["requests"] -= 1
        self._totals["queries"] -= look_up.queries

    def ended(self, name: str, reused: CountReused | None = None) -> None:
        """Count a request's look-up again once its filling has ended, and correct vLLM's statistics of its prompt.

        `reused` counts the reused tokens of its prompt; None if none was. Does nothing unless `allocated` counted it.
        """
        look_up = self._look_ups.pop(name, None)
        if look_up is None:
            return
        hits = 0 if reused is None else min(look_up.filled, reused(counted_from=look_up.local))
        look_up.correct(hits)
        self._totals["requests"] += 1
        self._totals["queries"] += look_up.queries
        self._totals["hits"] += hits

    def finished(self, name: str) -> None:
        """Forget a request; one that ended before its report has reused nothing."""
        self._idle.discard(name)
        self.ended(name)

    def totals(self) -> Corrections:
        """Return the totals so far, as a copy."""
        totals = self._totals.copy()
        totals["idle_waiting"] = len(self._idle)
        return totals
