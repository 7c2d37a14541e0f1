"""Report phrases that readers stumble over: `python docs/site/plain_english.py`, part of `make lint`.

It reads docstrings, comments and strings of the folders in `CODE`, and the prose of the pages in `PAGES`. Code within
pages is left out. Exits with 1 if anything is found. Extend `CODE` with each folder that has been reworded.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs")
CODE = (
    "docs/site",
    "cachecraft_rag/client",
    "cachecraft_rag/compute/captures",
    "cachecraft_rag/compute/stale_tokens",
    "cachecraft_rag/observability",
)
# Not reworded yet.
LEFT_OUT = ("docs/models.md",)

# Phrase → what to write instead.
PHRASES = {
    r"behind": "after",
    r"nobody": "no user, no request, unmarked …",
    r"anew": "again",
    r"whoever": "anyone who, a request that …",
    r"whose it is": "the owner",
    r"(?:is|are|was|were) told": "gets, receives, is given",
    r"of its own": "separate",
    r"lies? in": "is in",
    r"(?:is|are) none": "is missing, is invalid",
    r"what comes(?: again)?": "passages that repeat, the next …",
    r"what is late": "a late layer",
    r"ahead of": "before",
    r"as (?:it|they) stands?": "unchanged",
}
_PHRASE = re.compile("|".join(rf"(\b{phrase}\b)" for phrase in PHRASES), re.IGNORECASE)
_RIDDLES = ("What", "Whether", "Which", "Who", "Whose", "Where", "How")


def main() -> int:
    """Print each finding with its place; return the exit code."""
    findings = [
        finding
        for path in _files(PAGES, ".md")
        for finding in page_findings(path.read_text("utf-8"), path)
    ]
    findings += [
        finding
        for path in _files(CODE, ".py")
        for finding in code_findings(path.read_text("utf-8"), path)
    ]
    for finding in findings:
        print(finding)
    return 1 if findings else 0


def page_findings(text: str, path: Path) -> Iterator[str]:
    """Yield the findings in the prose of a Markdown page.

    >>> list(page_findings("Nobody waits.\\n```\\nnobody\\n```\\nRun `nobody`.", Path("a.md")))
    ['a.md:1: "Nobody": no user, no request, unmarked …']
    """
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code:
            prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)
            yield from _phrases(prose, path, number)


def code_findings(text: str, path: Path) -> Iterator[str]:
    """Yield the findings in docstrings, comments and strings of a module.

    >>> list(code_findings("'What is kept.'\\nx = 1  # read anew\\n", Path("a.py")))
    ['a.py:2: "anew": again', 'a.py:1: a docstring begins with "What": begin with a verb or a noun']
    """
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for offset, line in enumerate(token.string.splitlines()):
                yield from _phrases(line, path, token.start[0] + offset)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or " ").split(maxsplit=1)[:1]
            if first and first[0].strip(".,:;") in _RIDDLES:
                number = node.body[0].lineno
                yield f'{path}:{number}: a docstring begins with "{first[0]}": begin with a verb or a noun'


def _phrases(line: str, path: Path, number: int) -> Iterator[str]:
    for match in _PHRASE.finditer(line):
        advice = list(PHRASES.values())[(match.lastindex or 1) - 1]
        yield f'{path}:{number}: "{match[0]}": {advice}'


def _files(names: tuple[str, ...], suffix: str) -> Iterator[Path]:
    """Yield the files with these names and below these folders, relative to the current directory where possible."""
    for name in names:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob(f"*{suffix}")):
            is_left_out = file.relative_to(ROOT).as_posix() in (
                *LEFT_OUT,
                "docs/site/plain_english.py",
            )
            if not is_left_out:
                yield file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


if __name__ == "__main__":
    sys.exit(main())
