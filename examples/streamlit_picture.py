"""Pictures of an answer for `streamlit_app.py`: the prompt as a bar, the numbers below it, its sources.

Pure functions from an answer's statistics to HTML. Text of documents is escaped here and nowhere else.
"""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from typing import Any

from streamlit_conversations import Turn

from cachecraft_rag import Answer
from cachecraft_rag.cli.first_sentence import first_sentence

# How prompt tokens were obtained: the colour class in streamlit_style.css, and the words of legend and tooltips.
KINDS = {
    "device": "reused from device memory",
    "host": "reused from memory",
    "disk": "reused from disk",
    "remote": "reused from the remote store",
    "kept": "reused",
    "recomputed": "recomputed",
    "computed": "computed",
}
CAPTION = (
    "From left to right: the instruction (I) · the passages by their numbers, the best next to the question · "
    "the question (Q)"
)
Part = tuple[str, str, tuple[tuple[str, int], ...]]  # label, title, (kind, tokens) side by side


def _colour(kind: str, tokens: int) -> str:
    return f'<i class="cc-{kind}" style="flex:{tokens} 1 0"></i>'


def parts(answer: Answer, system_tokens: int) -> list[Part]:
    """The prompt's segments in order: instruction, passages (labelled by their rank among the sources), question."""
    stats = answer.stats
    laid_out = [chunk for chunk in stats.chunks if chunk.outcome != "trimmed"]
    question = stats.tokens_prompt - system_tokens - sum(chunk.tokens for chunk in laid_out)
    # The statistics have no entry for the instruction; the rest of the computed tokens are its own.
    system = stats.tokens_computed - question - sum(chunk.computed for chunk in laid_out)
    ranks = {source.chunk_id: (rank, source) for rank, source in enumerate(answer.sources, start=1)}
    row: list[Part] = [
        ("I", "Instruction", (("computed", system), ("kept", system_tokens - system)))
    ]
    for chunk in laid_out:
        rank, source = ranks[chunk.chunk_id]
        moved = chunk.tokens - chunk.computed - chunk.recomputed
        runs = (
            ("computed", chunk.computed),
            (str(chunk.tier), moved),
            ("recomputed", chunk.recomputed),
        )
        row.append((str(rank), f"{rank} · {title_of(source.metadata)}", runs))
    row.append(("Q", "Question", (("computed", question),)))
    return [(label, title, tuple(run for run in runs if run[1])) for label, title, runs in row]


def prompt_bar(answer: Answer, system_tokens: int) -> str:
    """The prompt as a bar, widths in proportion to tokens, with a tooltip for each part, a caption and a legend."""
    totals: Counter[str] = Counter()
    cells, left, whole = "", 0, answer.stats.tokens_prompt
    for label, title, runs in parts(answer, system_tokens):
        totals.update(dict(runs))
        tokens = sum(count for _, count in runs)
        # the tooltip opens towards the middle, so it stays in sight
        side = "left" if left < whole / 2 else "right"
        left += tokens
        words = ", ".join(f"{count} tokens {KINDS[kind]}" for kind, count in runs)
        tag = f"<b>{label}</b>" if tokens > whole * 0.03 else ""
        cells += (
            f'<div class="cc-part" tabindex="0" style="flex:{tokens} 1 0"><div class="cc-runs">'
            f"{''.join(_colour(*run) for run in runs)}</div>{tag}"
            f'<div class="cc-tip cc-{side}"><strong>{escape(title)}</strong><br>{words}</div></div>'
        )
    known = [
        (kind, words)
        for kind, words in (KINDS | {"kept": "instruction, reused"}).items()
        if totals[kind]
    ]
    legend = "".join(
        f'<span><i class="cc-{kind}"></i>{words} <em>{totals[kind]}</em></span>'
        for kind, words in known
    )
    if trimmed := sum(chunk.outcome == "trimmed" for chunk in answer.stats.chunks):
        legend += f"<span>{trimmed} {'passage' if trimmed == 1 else 'passages'} did not fit into the prompt</span>"
    caption = f'<p class="cc-quiet">{CAPTION}</p><div class="cc-legend">{legend}</div>'
    return f'<div class="cc-prompt"><div class="cc-bar">{cells}</div>{caption}</div>'


def title_of(metadata: Any) -> str:
    """A passage's title: the last of its headings, else its document."""
    return (
        str(metadata.get("heading") or metadata.get("source") or "untitled")
        .rsplit(" > ", 1)[-1]
        .lstrip("# ")
    )


def headline(turn: Turn) -> str:
    """One line of numbers under an answer."""
    assert turn.answer is not None
    stats, full, share = turn.answer.stats, turn.full_ttft_s, "nothing reused yet"
    if stats.tokens_reused:
        share = (
            f"<strong>{stats.tokens_reused / stats.tokens_prompt:.0%}</strong> of the prompt reused"
        )
    chips = [("", f"<strong>{seconds(stats.ttft_s)}</strong> to the first token"), ("", share)]
    if full:
        gain = full / stats.ttft_s if stats.tokens_reused else 1.0
        faster = f": <strong>{gain:.1f}×</strong> as long" if gain > 1.2 else ""
        chips.append(
            ("cc-good" if faster else "", f"<strong>{seconds(full)}</strong> without reuse{faster}")
        )
    if not turn.whole:
        chips.append(("", "interrupted"))
    return "".join(f'<span class="cc-chip {kind}">{text}</span>' for kind, text in chips)


def sources(answer: Answer, *, unfolded: bool = False) -> str:
    """The retrieved passages under a line that unfolds them, best first; each unfolds to its text."""
    cards = ""
    for rank, source in enumerate(answer.sources, start=1):
        score = "" if source.score is None else f"similarity {source.score:.2f}"
        cards += (
            f'<details class="cc-source"><summary><b>{rank}</b><span>{escape(title_of(source.metadata))}'
            f"<small>{escape(str(source.metadata.get('source', '')))}</small></span><em>{score}</em></summary>"
            f"<p>{escape(source.text)}</p></details>"
        )
    count = (
        f"{len(answer.sources)} sources"
        if answer.sources
        else "Nothing was found in the documents."
    )
    return f'<details class="cc-all"{" open" if unfolded else ""}><summary>{count}</summary>{cards}</details>'


def seconds(value: float) -> str:
    """A time with its unit: `85 ms`, `1.72 s`."""
    return f"{value * 1000:.0f} ms" if value < 0.1 else f"{value:.2f} s"


def size(nbytes: float) -> str:
    """A size with its unit: `42 MB`, `21.5 GB`."""
    return f"{nbytes / 1e6:.0f} MB" if nbytes < 1e9 else f"{nbytes / 1e9:.1f} GB"


def plain(text: str) -> str:
    """A name or a message escaped for Markdown, in one line: no link, no picture, no HTML."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return re.sub(
        r"([!#$&*+:<=>@\[\\\]^_`{|}~()\"-]|(?<=www)\.|(?<=^\d)\.)",
        r"\\\1",
        line,
        flags=re.IGNORECASE,
    )


def in_words(message: Exception | str) -> str:
    """A message without names of Python's exception classes, which say nothing to a reader."""
    text = re.sub(r"\b(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Warning): ", "", str(message))
    return re.sub(r" \((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Warning)\)", "", text)


def markdown_safe(text: str) -> str:
    """An answer as Markdown without formulas (`$5` is money) and pictures (no document may trigger a request)."""
    return text.replace("$", "\\$").replace("![", "!\\[")


def verdict(turn: Turn, audit: Any) -> str:
    """Whether the answer is the same without reuse, and if not, what it says then; empty until that is known."""
    if audit is None or turn.answer is None:
        return ""
    if audit.is_same:
        return '<p class="cc-verdict">The same answer without reuse</p>'
    words = f"Without reuse, {audit.agreeing} of {audit.tokens} tokens are the same"
    if audit.text is None:
        return f'<p class="cc-verdict">{words}.</p>'
    full = audit.text.same + audit.text.full
    full = first_sentence(full) or full  # answers of small models are cut there, too
    return f'<p class="cc-verdict">{words}; the answer is: <q>{escape(full.strip())}</q></p>'
