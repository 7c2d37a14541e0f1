"""A running `cachecraft serve`, as the programs of this folder see it: its model, its counters, its statistics."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx  # every application here installs it

HANDBOOK = Path(__file__).resolve().parents[1] / "handbook"
START = "cachecraft serve demo --reuse-plain-prompts -- --enforce-eager"
# A busy server holds a capture back for up to ten seconds. After a longer pause there are no more.
_QUIET_S = 20.0
_LONGEST_WAIT_S = 300.0


class Server:
    """A server at `url`. Raises SystemExit with what to do if it does not answer.

    Attributes:
        model: name of its model in requests.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self.model = httpx.get(f"{self.url}/v1/cachecraft", timeout=30).json()["model"]
        except (httpx.HTTPError, ValueError, KeyError):
            sys.exit(f"no cachecraft server answers at {url}; start one: {START}")

    def count(self, name: str, label: str = "") -> float:
        """Return the sum of a metric's values; `label`: only of lines with this text, such as `kind="reused"`."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(name) and label in line
        )

    def tokens_of(self, text: str) -> int:
        """Return the number of a text's tokens."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return int(httpx.post(f"{self.url}/tokenize", json=body, timeout=60).json()["count"])

    def statistics(self, answer_id: str) -> dict[str, Any]:
        """Return the statistics of an answer by its id; empty if the server remembers none."""
        reply = httpx.get(f"{self.url}/v1/cachecraft/requests/{answer_id}", timeout=30)
        return dict(reply.json()["stats"]) if reply.status_code == 200 else {}

    def captures(self) -> float:
        """Return how many chunk-caches were captured so far."""
        return self.count("cachecraft_captures_total", 'outcome="stored"')

    def wait_for_captures(self, before: float = -1.0) -> None:
        """Wait until there are more captures than `before`, and then no more for a while.

        Passages of unmarked text are captured in idle time, after they were sent a second time. A capture is a request
        of the server's own: while one runs, it waits.
        """
        end = time.monotonic() + _LONGEST_WAIT_S
        seen, quiet_since = before, time.monotonic()
        while time.monotonic() < (end if seen == before else min(end, quiet_since + _QUIET_S)):
            if (stored := self.captures()) != seen or self.count("vllm:num_requests_running"):
                seen, quiet_since = stored, time.monotonic()
            time.sleep(0.5)


def from_chunk_caches(stats: Mapping[str, Any]) -> int:
    """Return the tokens that came from chunk-caches unchanged, and not from the server's prefix cache."""
    return sum(
        chunk["tokens"] - chunk["computed"] - chunk["recomputed"]
        for chunk in stats.get("chunks", ())
        if chunk["outcome"] in ("exact", "reused") and chunk["reason_code"] != "prefix_cached"
    )


def passages(*pages: str) -> list[str]:
    """Return pages of the sample handbook."""
    return [(HANDBOOK / f"{page}.md").read_text(encoding="utf-8").strip() for page in pages]


def table(title: str, rows: Sequence[dict[str, object]]) -> None:
    """Print rows with the same keys, below their keys."""
    names = list(rows[0])
    lines = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    print(f"\n{title}")
    for line in lines:
        print("  " + "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
