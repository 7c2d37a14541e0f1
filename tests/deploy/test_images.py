"""The Dockerfile: hadolint, and that its parts agree with the package. .github/workflows/images.yml builds it."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.deploy.conftest import ROOT, serve_options

DOCKERFILE = ROOT / "Dockerfile"
PORTS = {"server": 8000, "app": 8501}


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, in order, as (name, rest of the line)."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = text.replace("\\\n", "")
    found: dict[str, list[tuple[str, str]]] = {"": []}
    stage = ""
    for line in text.splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            stage = rest.rpartition(" AS ")[2]
            found[stage] = []
        if name:
            found[stage].append((name, rest.strip()))
    return found


def instructions(stage: str, name: str) -> list[str]:
    return [rest for instruction, rest in stages()[stage] if instruction == name]


def arguments() -> dict[str, str]:
    """Values of the ARG lines before the first stage."""
    return dict(rest.split("=", 1) for name, rest in stages()[""] if name == "ARG")


def copied() -> list[str]:
    """Every path that is copied from the build's context."""
    lines = [line for stage in stages() for line in instructions(stage, "COPY")]
    return [path for line in lines if "--from=" not in line for path in line.split()[:-1]]


def test_hadolint_has_no_complaint(program: Callable[[str], str]) -> None:
    command = [program("hadolint"), "--no-color", DOCKERFILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_whatever_is_copied_exists_and_is_in_the_context() -> None:
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for path in copied():
        files = list(ROOT.glob(path))
        assert files, path
        for file in files:
            name = file.relative_to(ROOT).as_posix()
            parts = [name, f"{name}/config.toml"]
            assert any(fnmatch.fnmatch(part, one) for part in parts for one in allowed), name
    for pattern in allowed:
        assert list(ROOT.glob(pattern)), pattern


def test_the_wheel_is_built_from_every_folder_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"]["package-dir"].values()
    assert set(folders) <= set(copied())


def test_the_app_has_the_files_beside_its_script() -> None:
    found = " ".join(instructions("app", "COPY")).split()
    assert {"examples/streamlit_*.py", "examples/.streamlit"} <= set(found)
    named = set()
    for script in (ROOT / "examples").glob("streamlit_*.py"):
        source = script.read_text(encoding="utf-8")
        named |= set(re.findall(r'__file__\)\.parent / "(.*?)"', source))
    assert {"handbook", "streamlit_style.css"} <= named
    assert {f"examples/{name}" for name in named} <= set(found)


@pytest.mark.parametrize("target", sorted(PORTS))
def test_images_run_without_root_and_report_their_health(target: str) -> None:
    (user,) = instructions(target, "USER")
    assert user == "10001"
    assert "useradd --uid 10001" in " ".join(instructions(target, "RUN"))
    assert instructions(target, "VOLUME") == ["/data"]
    assert instructions(target, "EXPOSE") == [str(PORTS[target])]
    (health,) = instructions(target, "HEALTHCHECK")
    assert f"http://127.0.0.1:{PORTS[target]}/" in health
    code = json.loads(health[health.index("CMD") + 3 :])[2]
    compile(code, "HEALTHCHECK", "exec")
    variables = " ".join(instructions(target, "ENV"))
    assert "CACHECRAFT_STORE=/data/" in variables
    assert "HF_HOME=/data/" in variables


def test_the_server_starts_as_the_command_allows() -> None:
    (entrypoint,) = instructions("server", "ENTRYPOINT")
    command = json.loads(entrypoint)
    assert command[:2] == ["cachecraft", "serve"]
    given = serve_options([*command[2:], "Qwen/Qwen3-8B"])
    assert (given["host"], given["port"]) == ("0.0.0.0", PORTS["server"])


def test_versions_and_extras_are_the_package_s() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    vllm = Version(arguments()["VLLM_IMAGE"].rpartition(":v")[2])
    (requirement,) = (Requirement(line) for line in extras["vllm"])
    assert vllm in requirement.specifier
    assert f"| {vllm} |" in (ROOT / "docs/reference/vllm.md").read_text(encoding="utf-8")
    for target in PORTS:
        (named,) = re.findall(r"\.whl\)\[(.*?)\]", " ".join(instructions(target, "RUN")))
        assert set(named.split(",")) <= extras.keys()
    makefile = (ROOT / "Makefile").read_text()
    (model,) = re.findall(r"^MODEL_WHEEL := (.*)$", makefile, re.MULTILINE)
    assert model in " ".join(instructions("app", "RUN"))


def test_the_workflow_builds_every_target() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/images.yml").read_text())
    assert set(workflow["jobs"]["build"]["strategy"]["matrix"]["target"]) == PORTS.keys()
    compose = yaml.safe_load((ROOT / "examples/replicas/compose.yaml").read_text())
    assert compose["services"]["replica-1"]["build"]["target"] in stages()


YAML_FILES = (
    *sorted((ROOT / ".github/workflows").glob("*.yml")),
    *sorted((ROOT / "examples").rglob("*.y*ml")),
    ROOT / "mkdocs.yml",
)


@pytest.mark.parametrize(
    "path",
    [path for path in YAML_FILES if "templates" not in path.parts],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_yamllint_has_no_complaint(path: Path) -> None:
    from yamllint import linter
    from yamllint.config import YamlLintConfig

    config = YamlLintConfig(file=str(ROOT / ".yamllint.yaml"))
    problems = linter.run(path.read_text(encoding="utf-8"), config)
    assert [f"{problem.line}: {problem.desc}" for problem in problems] == []
