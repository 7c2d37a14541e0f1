"""Report long docstring lines that occur twice: `python docs/site/repeated_lines.py`, part of `make lint`.

It also prints the number of docstring lines per line of code, and of functions whose docstring is longer than their
body. Examples do not count for the latter, and neither do functions without a statement, as in protocols.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "cachecraft_rag"
LONG = 60  # characters of a line without its indentation

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Docstrings:
    """Counts over some modules.

    documentation  number of docstring lines
    code           number of lines with code, which are no docstring
    longer         functions whose docstring, up to its examples, is longer than their body
    places         long docstring line → the places where it is
    """

    documentation: int = 0
    code: int = 0
    longer: int = 0
    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, source: str, name: str) -> None:
        """Count a module.

        >>> counts = Docstrings()
        >>> counts.add('def f():\\n    \"\"\"One.\\n\\n    Two.\\n    \"\"\"\\n    return 1', "a.py")
        >>> counts.documentation, counts.code, counts.longer
        (4, 2, 1)
        """
        lines: set[int] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, _Documented) and ast.get_docstring(node) is not None:
                first = node.body[0]
                end = first.end_lineno or first.lineno
                lines.update(range(first.lineno, end + 1))
                self._note(node, name)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.body[1:]:
                    body = (node.end_lineno or end) - end
                    self.longer += _prose_lines(node) > body
        self.documentation += len(lines)
        self.code += len(_code_lines(source) - lines)

    def repeated(self) -> dict[str, list[str]]:
        """Return the long lines that occur more than once, with their places."""
        return {line: places for line, places in self.places.items() if len(places) > 1}

    def _note(self, node: _Documented, name: str) -> None:
        text = ast.get_docstring(node, clean=False) or ""
        for offset, line in enumerate(text.splitlines()):
            if len(line.strip()) >= LONG:
                self.places[line.strip()].append(f"{name}:{node.body[0].lineno + offset}")


def _prose_lines(node: _Documented) -> int:
    """Return the number of lines of a docstring before its first example, quotes included."""
    text = ast.get_docstring(node, clean=False) or ""
    prose, example, _ = text.partition(">>> ")
    return len((prose.rstrip() if example else text).splitlines())


def _code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold a token of code."""
    return {
        number
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NO_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }


def main() -> int:
    """Print the counts and each repeated line; return the exit code."""
    counts = Docstrings()
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        counts.add(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())
    repeated = counts.repeated()
    for line, places in repeated.items():
        print(f"{', '.join(places)}: say it once: {line}")
    ratio = counts.documentation / counts.code
    print(
        f"docstring lines per line of code {ratio:.2f}, longer than their function {counts.longer}"
    )
    return 1 if repeated else 0


if __name__ == "__main__":
    sys.exit(main())
