"""How much reuse saved today, for `streamlit_app.py`: counted over all visitors, and one answer's plan as a page."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from html import escape
from typing import Any

from streamlit_conversations import Turn
from streamlit_picture import seconds, title_of

OUTCOMES = {
    "exact": "reused as it was stored: nothing before it has changed",
    "reused": "reused at a new place",
    "computed": "computed",
    "trimmed": "left out: the prompt was full",
    "failed": "failed",
}


@dataclass
class Asked:
    """One answered question: its numbers without its text.

    saved_s  seconds by which the first token came sooner than without reuse; None until that is timed
    is_same  whether it is the answer of full prefill; None until it is audited
    """

    request_id: str
    tokens_prompt: int
    tokens_reused: int
    saved_s: float | None = None
    is_same: bool | None = None


@dataclass(frozen=True)
class Totals:
    """Sums over a day: of `timed` questions the seconds are known, of `audited` ones whether the answer is the same."""

    questions: int
    tokens_prompt: int
    tokens_reused: int
    saved_s: float
    timed: int
    same: int
    audited: int


class Savings:
    """What reuse saved on the current day, in memory: a new day and a restart of the server begin at zero.

    Any thread may call any method. `today` returns the current date.
    """

    def __init__(self, today: Callable[[], date] = date.today) -> None:
        self._today = today
        self._lock = threading.Lock()
        self._day = today()
        self._asked: dict[str, Asked] = {}

    def add(self, turn: Turn) -> None:
        """Count an answered question; the seconds that it saved once they are timed, so call it again then."""
        assert turn.answer is not None
        stats = turn.answer.stats
        with self._lock:
            self._begin_day()
            asked = self._asked.setdefault(
                stats.request_id, Asked(stats.request_id, stats.tokens_prompt, stats.tokens_reused)
            )
            if turn.full_ttft_s is not None:
                asked.saved_s = turn.full_ttft_s - stats.ttft_s

    def totals(self, audit_of: Callable[[str], Any]) -> Totals:
        """Return the sums of today; `audit_of` returns an answer's audit by its request id, or None."""
        with self._lock:
            self._begin_day()
            everyone = list(self._asked.values())
        for asked in everyone:
            audit = audit_of(asked.request_id) if asked.is_same is None else None
            if audit is not None:
                asked.is_same = bool(audit.is_same)
        timed = [asked.saved_s for asked in everyone if asked.saved_s is not None]
        audited = [asked.is_same for asked in everyone if asked.is_same is not None]
        return Totals(
            questions=len(everyone),
            tokens_prompt=sum(asked.tokens_prompt for asked in everyone),
            tokens_reused=sum(asked.tokens_reused for asked in everyone),
            saved_s=sum(timed),
            timed=len(timed),
            same=sum(audited),
            audited=len(audited),
        )

    def _begin_day(self) -> None:
        if self._today() != self._day:
            self._day = self._today()
            self._asked.clear()


def strip(totals: Totals) -> str:
    """What reuse saved today as one line of four figures; empty before the first question."""
    if not totals.questions:
        return ""
    share = totals.tokens_reused / max(1, totals.tokens_prompt)
    timed = f"saved in {totals.timed} timed" if totals.timed else "saved: none timed yet"
    audited = f"of {totals.audited} audited answers equal full prefill's"
    figures = (
        (f"{totals.questions}", "question today" if totals.questions == 1 else "questions today"),
        (f"{totals.tokens_reused:,}", f"tokens reused, {share:.0%} of the prompts"),
        (seconds(totals.saved_s) if totals.timed else "–", timed),
        (f"{totals.same}" if totals.audited else "–", audited),
    )
    cells = "".join(
        f"<div><strong>{figure}</strong><span>{words}</span></div>" for figure, words in figures
    )
    return f'<div class="cc-today" title="All visitors, since midnight or the start of this server">{cells}</div>'


def plan(turn: Turn, number: int) -> str:
    """The plan of one answer: what became of each passage of its prompt, and why, in the order of the prompt."""
    assert turn.answer is not None
    stats = turn.answer.stats
    ranks = {
        source.chunk_id: (rank, source) for rank, source in enumerate(turn.answer.sources, start=1)
    }
    rows = ""
    for chunk in stats.chunks:
        rank, source = ranks[chunk.chunk_id]
        reused = chunk.tokens - chunk.recomputed - chunk.computed
        cells = (
            f"<b>{rank}</b> {escape(title_of(source.metadata))}",
            escape(OUTCOMES[chunk.outcome])
            + (f" <small>{escape(chunk.reason)}</small>" if chunk.reason else ""),
            f"{reused}",
            f"{chunk.recomputed}",
            f"{chunk.computed}",
            chunk.tier or "–",
        )
        rows += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    names = ("passage", "what became of it", "tokens reused", "recomputed", "computed", "read from")
    head = "".join(f"<th>{name}</th>" for name in names)
    times = (
        f"first token after {seconds(stats.ttft_s)}: queue {seconds(stats.queue_s)}, plan {seconds(stats.plan_s)}, "
        f"load {seconds(stats.load_s)}, prefill {seconds(stats.prefill_s)}; "
        f"{stats.recompute_share:.0%} of the prompt's layers computed"
    )
    quality = f"<p>{escape(stats.quality)}</p>" if stats.quality else ""
    return (
        f'<p class="cc-asked"><small>{number}</small>{escape(turn.question)}</p>'
        f'<div class="cc-plan"><table><tr>{head}</tr>{rows}</table><p>{times}</p>{quality}</div>'
    )
