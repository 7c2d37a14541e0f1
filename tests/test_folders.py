"""The shape of the package: folders import in one direction, few entries, small folders, few public names."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import cachecraft_rag

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cachecraft_rag"
MODULES = sorted(
    path
    for folder in (PACKAGE, ROOT / "kernels", ROOT / "retrievers")
    for path in folder.rglob("*.py")
)


def imported(path: Path) -> set[str]:
    """The folders and top-level modules that a module imports, lazily and under TYPE_CHECKING too."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    return {name.split(".")[1] for name in names if name.startswith("cachecraft_rag.")} - {
        "__version__"
    }


def test_folders_import_in_one_direction() -> None:
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        if path != PACKAGE / "__init__.py":  # its imports are lazy names for users
            part = (
                path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT)
                .parts[0]
                .removesuffix(".py")
            )
            graph.setdefault(part, set()).update(imported(path) - {part})
    assert {
        "kernels",
        "retrievers",
        "planning",
        "store",
        "compute",
        "model",
        "prompt",
        "serving",
        "engine",
        "cli",
    } <= graph.keys()
    assert set().union(*graph.values()) <= graph.keys()
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names a circle


def test_few_entries_and_public_names() -> None:
    entries = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 22, sorted(entries)
    assert len(cachecraft_rag.__all__) <= 12


def test_folders_hold_few_modules() -> None:
    """At most 14 modules per folder."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    counts = {
        str(folder.relative_to(PACKAGE)): sum(
            path.name != "__init__.py" for path in folder.glob("*.py")
        )
        for folder in folders
    }
    too_large = {name: count for name, count in counts.items() if count > 14}
    assert not too_large


def test_parts_of_vllm_import_in_one_direction() -> None:
    """`server` and `worker` import the other modules; those import neither, nor do they import each other."""
    folder = PACKAGE / "vllm"
    for path in folder.rglob("*.py"):
        inner = path.relative_to(folder).parts[:-1]
        part = inner[0] if inner else "vllm"
        both = {"worker", "server"}
        forbidden = {"worker": {"server"}, "server": {"worker"}, "vllm": both, "idle": both}[part]
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        for name in forbidden:
            assert not [
                module for module in modules if module.startswith(f"cachecraft_rag.vllm.{name}")
            ], path


def test_mapped_packages_hold_only_a_docstring() -> None:
    for package in ("kernels", "retrievers"):
        tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
        assert len(tree.body) == 1, package
        assert ast.get_docstring(tree), package


def test_the_client_and_what_servers_share_import_nothing_from_vllm() -> None:
    for folder in ("client", "server"):
        for path in (PACKAGE / folder).rglob("*.py"):
            assert "vllm" not in imported(path), path


def test_what_servers_share_does_not_import_the_client() -> None:
    for path in (PACKAGE / "server").rglob("*.py"):
        assert "client" not in imported(path), path
