"""The names that we use of vLLM, checked in the sources of its versions; needs no vLLM."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import vllm_contract
from benchmarks.__main__ import app
from benchmarks.vllm_contract import (
    TABLE,
    USES,
    Import,
    Sources,
    Use,
    check,
    define,
    import_problem,
    our_imports,
    problems,
)
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.vllm.versions import KNOWN_VERSIONS, is_known_version

WHEELS = os.environ.get("TESTS_VLLM_WHEELS", "")  # folder of vLLM's wheels


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """A package that has the forms in which vLLM defines names."""
    files = {
        "__init__.py": 'MODULE_ATTRS = {"Engine": ".engine:Engine"}\n',
        "_version.py": "__version__ = version = '0.34.0'\n",
        "base.py": "class Base:\n    x: int = 0\n    def __init__(self):\n        self.y = 1\n",
        "engine.py": (
            "from .base import Base\nfrom vllm.utils import helper as assist\n"
            "if True:\n    class Engine(Base):\n        def run(self, prompt, *, limit=1): ...\n"
        ),
        "utils/__init__.py": "def helper(a, b): ...\n",
    }
    for name, text in files.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources(tmp_path)


def test_names_are_found_through_imports_and_lazy_tables(sources: Sources) -> None:
    assert sources.version == "0.34.0"
    for module, name in (
        ("vllm", "Engine"),
        ("vllm", "utils"),
        ("vllm.engine", "Base"),
        ("vllm.engine", "assist"),
    ):
        assert define(sources, module, name) is not None, (module, name)
    assert define(sources, "vllm.engine", "helper") is None
    assert define(sources, "vllm.gone", "Engine") is None


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (Use("vllm.gone"), "the module is missing"),
        (Use("vllm", "Other"), "the name is missing"),
        (Use("vllm.engine", "Engine.stop"), "the name is missing"),
        (Use("vllm", "Engine", attributes=("x", "y", "z")), "the attribute is missing"),
        (Use("vllm", "Engine.run", parameters=("self", "text")), "it takes (self, prompt)"),
        (Use("vllm", "Engine.run", keywords=("length",)), "it takes (limit, prompt, self)"),
        (Use("vllm.utils", text=("def assist(",)), "no longer says this"),
        (Use("vllm.base", "Base.x", parameters=("self",)), "not a function"),
    ],
)
def test_what_is_missing_or_changed_is_reported(sources: Sources, use: Use, says: str) -> None:
    wrong = [problem for _, problem in problems(sources, use) if problem]
    assert len(wrong) == 1
    assert says in wrong[0]


def test_what_is_there_is_not_reported(sources: Sources) -> None:
    use = Use("vllm", "Engine.run", parameters=("self", "prompt"), keywords=("limit",))
    for fine in (
        use,
        Use("vllm", "Engine", attributes=("x", "y", "run")),
        Use("vllm.utils", text=("def helper(",)),
    ):
        assert not any(problem for _, problem in problems(sources, fine))


def test_an_import_may_have_alternatives(sources: Sources, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "module.py").write_text(
        "try:\n    from vllm.moved import helper\nexcept ImportError:\n    from vllm.utils import helper\n"
        "from vllm.gone import thing\n"
    )
    gone, moved = our_imports(ours)
    assert moved == [Import("vllm.moved", "helper"), Import("vllm.utils", "helper")]
    assert import_problem(sources, moved) == ""
    assert gone == [Import("vllm.gone", "thing")]
    assert import_problem(sources, gone) == "it cannot be imported"


def test_a_path_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no package vllm"):
        Sources(tmp_path)
    with pytest.raises(ConfigError, match="pip download"):
        Sources(tmp_path / "missing.whl")


def test_the_command_lists_what_a_version_lacks(sources: Sources, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["vllm-contract", str(tmp_path)])
    assert done.exit_code == 1
    assert "vLLM 0.34.0: " in done.output
    assert "vllm.v1.request: Request: the module is missing" in done.output


def test_the_table_covers_every_import_and_use_for_every_known_version() -> None:
    """Written by `python -m benchmarks vllm-contract WHEEL… --table`, from a wheel of each version."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        header, *rows = list(csv.reader(file))
    versions = header[2:]
    assert all(is_known_version(version) for version in versions)
    assert {".".join(version.split(".")[:2]) for version in versions} == set(KNOWN_VERSIONS)
    assert {result for row in rows for result in row[2:]} == {"ok"}

    names = {(module, name) for module, name, *_ in rows}
    for group in our_imports():
        modules = " or ".join(dict.fromkeys(choice.module for choice in group))
        assert (modules, f"import {group[0].name}".strip()) in names
    for use in USES:
        attributes = {f"{use.name}.{name}" for name in use.attributes}
        texts = {f"text: {text}" for text in use.text}
        for name in attributes | texts:
            assert (use.module, name) in names


@pytest.mark.slow
@pytest.mark.skipif(not WHEELS, reason="TESTS_VLLM_WHEELS names no folder with vLLM's wheels")
@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_every_known_version_has_what_we_use(version: str) -> None:
    wheels = list(Path(WHEELS).glob(f"vllm-{version}.*.whl"))
    assert len(wheels) == 1, (
        f"TESTS_VLLM_WHEELS={WHEELS} must hold one wheel of vLLM {version}, it holds {len(wheels)}"
    )
    assert [row for row in check(Sources(wheels[0])) if row[2]] == []


def test_the_installed_version_has_what_we_use() -> None:
    vllm = pytest.importorskip("vllm")
    assert [row for row in check(Sources(Path(vllm.__file__).parents[1])) if row[2]] == []


def test_the_old_places_are_reported_as_missing(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.33 has moved the server's arguments: an import without an alternative is found."""
    only_old = [[Import("vllm.entrypoints.launchers.cli_args", "make_arg_parser")]]
    monkeypatch.setattr(vllm_contract, "our_imports", lambda: only_old)
    monkeypatch.setattr(vllm_contract, "USES", ())
    assert [problem for _, _, problem in check(sources)] == ["it cannot be imported"]
