"""The two consoles, `out` and `err`: text of documents, models and other users is printed as plain text.

Markup is not interpreted, and control characters are escaped instead of reaching the terminal. Only this module
guarantees that: every output goes through these two consoles or through `as_json`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from cachecraft_rag.errors import CacheCraftError

# C0 except tab and line feed, DEL, C1; and lone surrogates, which cannot be encoded.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_UNPRINTABLE_IN_JSON = re.compile("[\x7f-\x9f\ud800-\udfff]")  # json escapes C0 itself


def visible(text: str) -> str:
    r"""Return the text with control characters escaped, but for tabs and line feeds; "\r\n" becomes "\n".

    >>> visible("\x1b[2Jfine\r\n\x9b1m")
    '\\x1b[2Jfine\n\\x9b1m'
    """
    return _UNPRINTABLE.sub(_escape, text.replace("\r\n", "\n"))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def as_json(value: object) -> str:
    """Return one line of JSON that is safe to print: non-ASCII letters as they are, control characters escaped.

    Values of other types become their `str`, and NaN and infinities null, because JSON has no such numbers.
    """
    text = json.dumps(value, ensure_ascii=False, default=str)
    if "NaN" in text or "Infinity" in text:
        finite = json.loads(text, parse_constant=lambda _: None)
        text = json.dumps(finite, ensure_ascii=False)
    return _UNPRINTABLE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class PlainConsole(Console):
    """A console without markup and highlights. For style, pass `style=` or print a `Text`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render_str(self, text: str, **how: Any) -> Text:
        """Return the text as rich renders it, control characters escaped first, because they count as width."""
        return super().render_str(visible(text), **how)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments that rich renders, with control characters escaped in objects such as `Text` too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def console_on(stream: TextIO) -> PlainConsole:
    """Return a console for stdout or stderr, 200 columns wide without a terminal or COLUMNS, for whole tables."""
    wide = None if stream.isatty() or "COLUMNS" in os.environ else 200
    return PlainConsole(stderr=stream is sys.stderr, width=wide)


out = console_on(sys.stdout)
err = console_on(sys.stderr)


def print_error(error: CacheCraftError, advice: str = "") -> None:
    """Print the message of an error, and a sentence of advice that only the command knows, to stderr."""
    err.print("error:", style="bold red", end=" ")
    err.print(f"{error} {advice}".strip(), soft_wrap=True)
