"""An extension of griffe: our docstrings as Markdown.

In the source, fields are a column of names beside a column of explanations, and examples are doctests. Markdown would
run both together.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_PARAMETERS = re.compile(r"( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +\S.*)*)")
_FIELD = re.compile(r"(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*) {2,}(?P<text>\S.*)")


class Docstrings(griffe.Extension):
    """Rewrites each docstring before mkdocstrings reads it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    r"""Fields as a list, doctests as code.

    >>> print(as_markdown("Settings.\n\nstop   strings that\n       end it\nseed   of the draw"))
    Settings.
    <BLANKLINE>
    - `stop`: strings that end it
    - `seed`: of the draw
    """
    docstring = _PARAMETERS.sub(
        lambda shared: "\n".join(f"{shared[1]}{name}{shared[3]}" for name in shared[2].split(", ")),
        docstring,
    )
    return "\n\n".join(_block(block) for block in re.split(r"\n{2,}", docstring))


def _block(block: str) -> str:
    lines = block.split("\n")
    if lines[0].startswith(">>> "):
        return "\n".join(
            ["```pycon", *(line.replace("  # doctest: +SKIP", "") for line in lines), "```"]
        )
    if not _FIELD.fullmatch(lines[0]):
        return block
    items: list[str] = []
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field:
            names = ", ".join(f"`{name}`" for name in field["names"].split(", "))
            items.append(f"- {names}: {field['text']}")
        else:
            items[-1] += f" {line.strip()}"
    return "\n".join(items)
