"""The two consoles. Whatever they print may come from a document, a model or another user, and is only ever text.

Nothing is markup to them, and control characters show as what they are instead of steering the terminal. This is the
only place that sees to it: everything printed goes through these two, or is JSON of `as_json`.
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

# C0 but for tab and line feed, DEL, C1; and halves of surrogate pairs, which no terminal can be sent.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_UNPRINTABLE_IN_JSON = re.compile("[\x7f-\x9f\ud800-\udfff]")  # json escapes C0 itself


def visible(text: str) -> str:
    r"""The text with control characters written out; a carriage return before a line feed goes without a trace.

    >>> visible("\x1b[2Jfine\r\n\x9b1m")
    '\\x1b[2Jfine\n\\x9b1m'
    """
    return _UNPRINTABLE.sub(_escape, text.replace("\r\n", "\n"))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def as_json(value: Any) -> str:
    """One line of JSON that may be printed: umlauts as they are, control characters escaped."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return _UNPRINTABLE_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class PlainConsole(Console):
    """A console that takes text for text. Where style is wanted, give it as `style=` or print a `Text`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render_str(self, text: str, **how: Any) -> Text:
        """As rich does, after control characters are written out: so that columns are as wide as what they show."""
        return super().render_str(visible(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does; text that came as no string (a `Text`, a spinner's) is made visible here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def console_on(stream: TextIO) -> PlainConsole:
    """A console on stdout or stderr; wide where that is no terminal, so that tables in files and pipes are whole."""
    wide = None if stream.isatty() or "COLUMNS" in os.environ else 200
    return PlainConsole(stderr=stream is sys.stderr, width=wide)
