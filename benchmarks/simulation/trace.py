"""Traces: which chunks each request used, in prompt order."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from cachecraft_rag.checks import check_number, check_path, check_whole
from cachecraft_rag.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests for chunks.

    requests  the chunks of each request in prompt order, as numbers from 0
    tokens    `[chunks]`: the length of each chunk
    """

    requests: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]

    @property
    def asked_tokens(self) -> int:
        """Tokens of all chunks of all requests: the cost of computing everything."""
        return sum(self.tokens[chunk] for request in self.requests for chunk in request)


def read_trace(path: Path, *, chunk_tokens: int = 256) -> Trace:
    """A file of JSON lines with a list "chunks" (numbers or names) each; other fields are passed over.

    The lines that `cachecraft --log-json` writes may be among them: of these, requests are read.

    A list "tokens" gives the chunks' lengths, else each has `chunk_tokens`. Where every line has a number "time", the
    requests are sorted by it. A chunk that stands twice in a request counts once, as in a prompt. Raises ConfigError.
    """
    check_path("trace", path)
    check_whole("chunk_tokens", chunk_tokens, least=1)
    numbers: dict[int | str, int] = {}
    lengths: dict[int, int] = {}
    found: list[tuple[float, tuple[int, ...]]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for place, line in enumerate(lines, start=1):
                if line.strip() and (request := _request(line, f"{path}, line {place}")):
                    time, names, tokens = request
                    chunks = tuple(
                        dict.fromkeys(numbers.setdefault(name, len(numbers)) for name in names)
                    )
                    lengths.update(
                        (numbers[name], length) for name, length in zip(names, tokens, strict=False)
                    )
                    found.append((time, chunks))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not any(chunks for _, chunks in found):
        raise ConfigError(f"{path} holds no request with chunks")
    found.sort(key=lambda one: one[0])  # stable: without times, as in the file
    return Trace(
        tuple(chunks for _, chunks in found),
        tuple(lengths.get(n, chunk_tokens) for n in range(len(numbers))),
    )


def _request(line: str, where: str) -> tuple[float, list[int | str], list[int]] | None:
    """Return time, chunks and their lengths; None for a log line that is no request."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: no JSON ({error})") from error
    if isinstance(fields, dict) and "logger" in fields:
        if fields.get("event") != "request":
            return None
        fields = _of_log(fields)
    names = fields.get("chunks") if isinstance(fields, dict) else None
    if not isinstance(names, list) or not all(type(name) in (int, str) for name in names):
        raise ConfigError(f'{where}: needs a list "chunks" of numbers or names')
    tokens = fields.get("tokens", [])
    sound = isinstance(tokens, list) and all(
        type(length) is int and length > 0 for length in tokens
    )
    if not sound or len(tokens) not in (0, len(names)):
        raise ConfigError(f'{where}: "tokens" must give each chunk its length')
    time = fields.get("time", 0.0)
    check_number(f'{where}: "time"', time, least=-1e300)
    return float(time), names, tokens


def _of_log(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a trace from those of a request's log line; chunks left out of the prompt have no tokens."""
    chunks = [chunk for chunk in fields["chunks"] if chunk["tokens"]]
    return {
        "time": datetime.fromisoformat(fields["time"]).timestamp(),
        "chunks": [chunk["chunk_id"] for chunk in chunks],
        "tokens": [chunk["tokens"] for chunk in chunks],
    }
