"""The import graph is part of the design: a module imports only from the floors below it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "cachecraft_rag": ROOT / "cachecraft_rag",
    "cachecraft_rag.kernels": ROOT / "kernels",
    "cachecraft_rag.retrievers": ROOT / "retrievers",
}

# Lowest first. A package stands for all its modules, which may import each other but not in a circle; the modules of
# `retrievers` live on floors of their own and are listed one by one.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"types", "errors", "bridge", "closing", "markup", "plain_text", "throttle", "kernels"}),
    frozenset(
        {"database", "documents", "chunking", "prompt", "scoring", "drift", "plotting", "expected", "catalog_rows"}
    )
    | frozenset(
        {"codecs", "selection", "focus", "embedded", "stats", "turns", "checks", "errands", "hub", "processes"}
    ),
    frozenset({"config", "catalog", "tiers", "captures"})
    | frozenset({"retrievers.filters", "retrievers.schema", "retrievers.vector_index"}),
    frozenset(
        {"store", "models", "planner", "decode", "calibration", "retrievers.faiss_store", "retrievers.embeddings"}
    ),
    frozenset({"prefill", "write_back", "retrievers.indexer"}),
    frozenset({"probing", "selfcheck"}),
    frozenset({"loading", "request"}),
    frozenset({"engine"}),
    frozenset({"priming"}),
    frozenset({"rag"}),
    frozenset({"evaluation", "bench", "langchain", "llama_index"})
    | frozenset({"retrievers.langchain", "retrievers.llama_index"}),
    frozenset({"cli"}),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def unit_of(module: str) -> str:
    """The name that has a floor: `cachecraft_rag.store.disk` → `tiers`, `….retrievers.x` → `retrievers.x`."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[0] == "retrievers" else 1])


def source_modules() -> dict[str, Path]:
    """Every module of the package by its import name, apart from the lazy `cachecraft_rag/__init__.py`."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    del found["cachecraft_rag"]
    found.pop("cachecraft_rag.retrievers", None)  # checked to hold nothing but its docstring, below
    return found


MODULES = source_modules()


def own_imports(path: Path) -> set[str]:
    """Modules of our package that `path` imports, anywhere in the file, under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {resolve(name, path) for name in names if name.split(".")[0] == "cachecraft_rag"}
    return found - {""}


def resolve(name: str, path: Path) -> str:
    """The module behind an imported name: `cachecraft_rag.types.Chunk` → `cachecraft_rag.types`; '' for the version."""
    if name == "cachecraft_rag.__version__":
        return ""
    packages = {module.rsplit(".", 1)[0] for module in MODULES}
    parent = name.rsplit(".", 1)[0]
    for candidate in (name, parent):
        if candidate in MODULES or (candidate in packages and candidate != "cachecraft_rag"):
            return candidate
    raise AssertionError(f"{path} imports {name}: no such module; import a name from the module that defines it")


def check(module: str, imports: set[str]) -> list[str]:
    """What is wrong with the imports of one module, in words; empty when all of them point downwards."""
    unit = unit_of(module)
    if unit not in FLOOR_OF:
        return [f"{module} has no floor: add {unit!r} to FLOORS here and to the table in docs/architecture.md"]
    problems = []
    for other in sorted(imports):
        if unit_of(other) == unit:
            continue
        floor = FLOOR_OF.get(unit_of(other))
        if floor is None:
            problems.append(f"{module} imports {other}, which has no floor")
        elif floor >= FLOOR_OF[unit]:
            problems.append(
                f"{module} (floor {FLOOR_OF[unit]}) imports {other} (floor {floor}); only lower floors may be"
            )
    return problems


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports, or an empty list."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return trail[trail.index(module) :]
        if module in done:
            return []
        for other in sorted(graph.get(module, ())):
            if found := visit(other, [*trail, module]):
                return found
        done.add(module)
        return []

    for module in sorted(graph):
        if found := visit(module, []):
            return found
    return []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_only_lower_floors(module: str) -> None:
    problems = check(module, own_imports(MODULES[module]))
    assert not problems, "\n".join(problems)


def test_no_module_imports_in_a_circle() -> None:
    graph = {module: own_imports(path) - {module} for module, path in MODULES.items()}
    # `from package import submodule` is an import of the submodule: a package's own __init__ is no part of that circle.
    assert circle(graph) == []


def test_every_floor_names_what_exists_once() -> None:
    assert sum(map(len, FLOORS)) == len(FLOOR_OF)
    assert set(FLOOR_OF) == {unit_of(module) for module in MODULES}


def test_the_architecture_page_shows_these_floors() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| (.+) \|$", page, re.MULTILINE)
    shown = [set(re.findall(r"`([a-z_./]+)`", re.sub(r"\([^)]*\)", "", row))) for row in rows]
    drawn = [{name.replace(".", "/") for name in floor} for floor in FLOORS]
    assert [{name.rstrip("/") for name in floor} for floor in shown] == drawn


@pytest.mark.parametrize("package", ["kernels", "retrievers"])
def test_mapped_packages_hold_only_a_docstring(package: str) -> None:
    body = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")).body
    assert len(body) == 1
    assert ast.get_docstring(ast.Module(body, [])), f"{package}/__init__.py must hold a docstring alone"


def test_the_check_sees_what_it_must_see() -> None:
    assert check("cachecraft_rag.store", {"cachecraft_rag.store.catalog", "cachecraft_rag.types"}) == []
    assert "only lower floors" in check("cachecraft_rag.types", {"cachecraft_rag.store"})[0]
    assert "only lower floors" in check("cachecraft_rag.types", {"cachecraft_rag.errors"})[0]  # siblings
    assert "no floor" in check("cachecraft_rag.novelty", set())[0]
    assert check("cachecraft_rag.store.disk", {"cachecraft_rag.tiers.base"}) == []
    assert (
        "only lower floors"
        in check("cachecraft_rag.retrievers.embeddings", {"cachecraft_rag.retrievers.faiss_store"})[0]
    )
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []
