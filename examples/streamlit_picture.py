"""Pictures of an answer for `streamlit_app.py`: the prompt as a bar, its sources, times to the first token, the store.

Pure functions from an answer's statistics to HTML or a chart. Text of documents is escaped here and nowhere else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from cachecraft_rag import Answer

if TYPE_CHECKING:
    import altair as alt

# How a run of prompt tokens was obtained: its colour class in streamlit_style.css, and its name in the legend.
KINDS = {
    "device": "reused from device memory",
    "host": "reused from host memory",
    "disk": "reused from disk",
    "remote": "reused from the remote store",
    "kept": "instruction, reused",
    "recomputed": "recomputed",
    "computed": "computed",
}
REUSE, FULL = "with reuse", "without reuse"
_STEPS = (
    ("Add documents", "Upload files on the left, or add the sample handbook.", ()),
    ("Ask", "The first answer is computed in full, and what was computed is stored.", ("computed",) * 4),
    (
        "Ask on",
        "Passages that come up again are reused wherever they stand, so the answer begins sooner.",
        ("host", "disk", "recomputed", "host"),
    ),
)
WELCOME = (
    '<div class="cc-steps">'
    + "".join(
        f"<div><small>{number}</small><strong>{name}</strong><p>{text}</p>"
        f'<div class="cc-bar">{"".join(f"<i class={chr(34)}cc-{kind}{chr(34)}></i>" for kind in kinds)}</div></div>'
        for number, (name, text, kinds) in enumerate(_STEPS, start=1)
    )
    + "</div>"
)


@dataclass
class Turn:
    """A question and its answer. `arguments` repeat the call; `full_ttft_s` is None until full prefill is timed.

    `brief`: the answer was to end after its first sentence, and did.
    """

    question: str
    answer: Answer
    arguments: dict[str, Any]
    full_ttft_s: float | None = None
    brief: bool = False

    @property
    def speedup(self) -> float | None:
        """How many times faster the first token came than with full prefill."""
        return self.full_ttft_s / self.answer.stats.ttft_s if self.full_ttft_s else None

    @property
    def reused_share(self) -> float:
        """The share of prompt tokens that were reused without being recomputed."""
        return self.answer.stats.tokens_reused / self.answer.stats.tokens_prompt


@dataclass(frozen=True)
class Part:
    """One segment of the bar: `runs` are (kind, tokens) side by side, `facts` the rows of its tooltip."""

    label: str
    title: str
    runs: tuple[tuple[str, int], ...]
    facts: tuple[tuple[str, str], ...]

    @property
    def tokens(self) -> int:
        """Its length in tokens."""
        return sum(tokens for _, tokens in self.runs)


def parts(answer: Answer, system_tokens: int) -> list[Part]:
    """The prompt's segments in order: system, chunks (labelled by their rank among the sources), question."""
    stats = answer.stats
    laid_out = [chunk for chunk in stats.chunks if chunk.outcome != "trimmed"]
    question_tokens = stats.tokens_prompt - system_tokens - sum(chunk.tokens for chunk in laid_out)
    # The statistics have no entry for the system segment; the rest of the computed tokens are its own.
    system = stats.tokens_computed - question_tokens - sum(chunk.computed for chunk in laid_out)
    ranks = {source.chunk_id: (place, source) for place, source in enumerate(answer.sources, start=1)}
    row = [_end("S", "Instruction", system_tokens, system, "the same in every prompt")]
    for chunk in laid_out:
        place, source = ranks[chunk.chunk_id]
        moved = chunk.tokens - chunk.computed - chunk.recomputed
        runs = (("computed", chunk.computed), (str(chunk.tier), moved), ("recomputed", chunk.recomputed))
        facts = [("what", _outcome(chunk)), ("tokens", str(chunk.tokens))]
        if chunk.recomputed:
            facts.append(("recomputed", f"{chunk.recomputed} tokens"))
        if chunk.tier:
            facts.append(("loaded from", KINDS[chunk.tier].removeprefix("reused from ")))
            if chunk.computed:  # overlapped prefill: these were computed before they were loaded
                facts.append(("computed", f"{chunk.computed} tokens, faster than loading"))
        if chunk.variant_id:
            facts.append(("variant", chunk.variant_id[:12]))
        facts += [(name, f"{v:.2f}") for name, v in (("CFO", chunk.cfo), ("β′", chunk.beta_prime)) if v is not None]
        if chunk.reason:
            facts.append(("why", chunk.reason))
        title = f"{place} · {title_of(source.metadata)}"
        row.append(Part(str(place), title, tuple(run for run in runs if run[1]), tuple(facts)))
    return [*row, _end("Q", "Question", question_tokens, question_tokens, "new each time")]


def _end(label: str, title: str, tokens: int, computed: int, why: str) -> Part:
    """The system or the question segment."""
    runs = tuple(run for run in (("computed", computed), ("kept", tokens - computed)) if run[1])
    what = "computed" if computed else "reused"
    return Part(label, title, runs, (("what", what), ("tokens", str(tokens)), ("why", why)))


def _outcome(chunk: Any) -> str:
    words = {"exact": "reused exactly", "reused": "reused", "computed": "computed", "trimmed": "left out"}
    return words[chunk.outcome] + (", partly recomputed" if chunk.recomputed else "")


def title_of(metadata: Any) -> str:
    """A chunk's title: the last of its headings, else its document."""
    return str(metadata.get("heading") or metadata.get("source") or "untitled").rsplit(" > ", 1)[-1].lstrip("# ")


def prompt_bar(answer: Answer, system_tokens: int) -> str:
    """The prompt as a bar, widths in proportion to tokens, with a tooltip for each segment and a legend."""
    row = parts(answer, system_tokens)
    whole, left, cells = sum(part.tokens for part in row), 0, []
    totals: Counter[str] = Counter()
    for part in row:
        side = "left" if left < whole / 2 else "right"  # the tooltip opens towards the middle, so it stays in sight
        runs = "".join(f'<i class="cc-{kind}" style="flex:{tokens} 1 0"></i>' for kind, tokens in part.runs)
        tag = f"<b>{escape(part.label)}</b>" if part.tokens > whole * 0.03 else ""
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in part.facts)
        cells.append(
            f'<div class="cc-part" tabindex="0" style="flex:{part.tokens} 1 0"><div class="cc-runs">{runs}</div>{tag}'
            f'<div class="cc-tip cc-{side}"><strong>{escape(part.title)}</strong><dl>{facts}</dl></div></div>'
        )
        left += part.tokens
        for kind, tokens in part.runs:
            totals[kind] += tokens
    legend = "".join(
        f'<span><i class="cc-{kind}"></i>{name} <em>{totals[kind]}</em></span>'
        for kind, name in KINDS.items()
        if totals[kind]
    )
    trimmed = sum(chunk.outcome == "trimmed" for chunk in answer.stats.chunks)
    if trimmed:
        legend += f"<span>{trimmed} chunks left out: they did not fit the prompt</span>"
    spoken = ", ".join(f"{totals[kind]} tokens {name}" for kind, name in KINDS.items() if totals[kind])
    return (
        f'<div class="cc-prompt"><div class="cc-bar" role="group" aria-label="The prompt: {spoken}">{"".join(cells)}'
        f'</div><div class="cc-legend">{legend}</div></div>'
    )


def headline(turn: Turn) -> str:
    """One line of statistics under an answer."""
    stats = turn.answer.stats
    line = f'<span class="cc-chip"><strong>{seconds(stats.ttft_s)}</strong> to first token</span>'
    if turn.full_ttft_s and turn.speedup and turn.speedup > 1.2:
        line += f'<span class="cc-chip cc-good"><strong>{turn.speedup:.1f}×</strong> faster than without reuse</span>'
    elif turn.full_ttft_s:
        line += f'<span class="cc-chip"><strong>{seconds(turn.full_ttft_s)}</strong> without reuse</span>'
    line += (
        f'<span class="cc-chip"><strong>{turn.reused_share:.0%}</strong> of {stats.tokens_prompt} tokens reused</span>'
    )
    if stats.finish == "closed" and not turn.brief:
        line += '<span class="cc-chip">stopped</span>'
    return f'<div class="cc-line">{line}</div>'


def sources(answer: Answer, *, unfolded: bool = False) -> str:
    """The retrieved chunks under a line that unfolds them, best first; each unfolds to its text."""
    reports = {chunk.chunk_id: chunk for chunk in answer.stats.chunks}
    cards = []
    for place, source in enumerate(answer.sources, start=1):
        chunk = reports.get(source.chunk_id)
        kind = "" if chunk is None else "computed" if chunk.computed == chunk.tokens else chunk.tier or ""
        score = "" if source.score is None else f"{source.score:.2f}"
        cards.append(
            f'<details class="cc-source"><summary><i class="cc-rank cc-{kind}">{place}</i>'
            f"<span><strong>{escape(title_of(source.metadata))}</strong>"
            f"<small>{escape(str(source.metadata.get('source', '')))}</small></span>"
            f"<em>{score}</em></summary><p>{escape(source.text)}</p></details>"
        )
    if not cards:
        return '<p class="cc-quiet">Nothing was found in the documents.</p>'
    count = f"{len(cards)} sources" if len(cards) > 1 else "1 source"
    return f'<details class="cc-all"{" open" if unfolded else ""}><summary>{count}</summary>{"".join(cards)}</details>'


def ttft_chart(turns: Sequence[Turn]) -> alt.LayerChart:
    """Times to the first token by question: with reuse, and with full prefill if it was measured."""
    import altair as alt

    rows = [
        {"question": number, "asked": turn.question, "how": how, "seconds": value, "speedup": label}
        for number, turn in enumerate(turns, start=1)
        for how, value, label in (
            (FULL, turn.full_ttft_s, ""),
            (REUSE, turn.answer.stats.ttft_s, f"{turn.speedup:.1f}×" if turn.speedup else ""),
        )
        if value
    ]
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X("question:O", title=None, axis=alt.Axis(labelAngle=0, labelExpr="'question ' + datum.value")),
        xOffset=alt.XOffset("how:N", scale=alt.Scale(domain=[FULL, REUSE])),
        y=alt.Y("seconds:Q", title="seconds", axis=alt.Axis(tickCount=4)),
    )
    bars = base.mark_bar(cornerRadiusEnd=3).encode(
        color=alt.Color(
            "how:N",
            scale=alt.Scale(domain=[FULL, REUSE], range=["#94a3b8", "#14b8a6"]),
            legend=alt.Legend(orient="top", title=None),
        ),
        tooltip=[
            alt.Tooltip("asked:N", title="question"),
            alt.Tooltip("how:N", title="how"),
            alt.Tooltip("seconds:Q", format=".3f"),
        ],
    )
    label = base.mark_text(dy=-7, color="#14b8a6", fontWeight=600).encode(text="speedup:N")
    chart: alt.LayerChart = (bars + label).properties(height=215)
    return chart


def meters(rows: Iterable[tuple[str, str, float]]) -> str:
    """Thin bars for the sidebar: (name, value in words, share between 0 and 1)."""
    return "".join(
        f'<div class="cc-meter"><span>{escape(name)}<em>{escape(value)}</em></span>'
        f'<div><i style="width:{min(1.0, share):.1%}"></i></div></div>'
        for name, value, share in rows
    )


def seconds(value: float) -> str:
    """A time with its unit: `85 ms`, `1.72 s`."""
    return f"{value * 1000:.0f} ms" if value < 0.1 else f"{value:.2f} s"


def nbytes(value: int) -> str:
    """A size with its unit: `12 MB`, `2.0 GB`."""
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def plain(text: str) -> str:
    """A name or a message escaped for Markdown, in one line: no link, no picture, no HTML."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return re.sub(r"([!#$&*+:<=>@\[\\\]^_`{|}~()\"-]|(?<=www)\.|(?<=^\d)\.)", r"\\\1", line, flags=re.IGNORECASE)


def markdown_safe(text: str) -> str:
    """An answer as Markdown without formulas (`$5` is money) and pictures (no document may trigger a request)."""
    return text.replace("$", "\\$").replace("![", "!\\[")
