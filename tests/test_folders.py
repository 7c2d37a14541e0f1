"""The shape of the package: folders import in one direction, few entries, short modules, few public names."""

from __future__ import annotations

import ast
import graphlib
import tokenize
from pathlib import Path

import cachecraft_rag

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cachecraft_rag"
MODULES = sorted(path for folder in (PACKAGE, ROOT / "kernels", ROOT / "retrievers") for path in folder.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The folders and top-level modules that a module imports, lazily and under TYPE_CHECKING too."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    return {name.split(".")[1] for name in names if name.startswith("cachecraft_rag.")} - {"__version__"}


def test_folders_import_in_one_direction() -> None:
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        if path != PACKAGE / "__init__.py":  # its imports are lazy names for users
            part = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).parts[0].removesuffix(".py")
            graph.setdefault(part, set()).update(imported(path) - {part})
    assert {"kernels", "retrievers", "planning", "store", "compute", "engine", "cli"} <= graph.keys()
    assert set().union(*graph.values()) <= graph.keys()
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names a circle


def test_few_entries_and_public_names() -> None:
    entries = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 15, sorted(entries)
    assert len(cachecraft_rag.__all__) <= 12


def code_lines(path: Path) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in skipped:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        has_body = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_body and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def test_modules_are_short() -> None:
    one_class = {
        ROOT / "cachecraft_rag" / "store" / name for name in ("catalog.py", "chunk_store.py")
    }  # one concept each
    limits = {path: 500 if path in one_class else 350 for path in MODULES}
    long = {str(path.relative_to(ROOT)): lines for path in MODULES if (lines := code_lines(path)) > limits[path]}
    assert not long


def test_mapped_packages_hold_only_a_docstring() -> None:
    for package in ("kernels", "retrievers"):
        tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
        assert len(tree.body) == 1, package
        assert ast.get_docstring(tree), package
