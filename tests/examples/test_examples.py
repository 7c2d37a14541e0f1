"""The examples run as they stand, in a folder of their own, and show what they are there to show."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from cachecraft_rag.cli.app import app

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PUBLIC = {"cachecraft_rag", "cachecraft_rag.langchain", "cachecraft_rag.llama_index"} | {
    "cachecraft_rag.retrievers.langchain",
    "cachecraft_rag.retrievers.llama_index",
}
# As on a CPU that does not compute bf16: otherwise the answers of so small a model depend on the machine.
RUN = """
import runpy, sys
from cachecraft_rag.model import decoder
decoder._FAST_BFLOAT16 = ()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Any attempt to reach another machine ends the program; so do a first download of data files and a request to OpenAI.
OFFLINE = """
import sys
def hook(event, args):
    if event in ("socket.connect", "socket.getaddrinfo") or event == "import" and args[0] == "openai":
        raise SystemExit(f"not offline: {event} {args}")
sys.addaudithook(hook)
"""


def run_example(name: str, folder: Path, *, prepare: str = "") -> str:
    """Output of an example that runs in `folder`, after the statements `prepare`."""
    command = [sys.executable, "-c", prepare + RUN, EXAMPLES / name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_quickstart_reuses_the_captures_of_the_first_question(
    demo_model: Path, tmp_path: Path
) -> None:
    printed = run_example("quickstart.py", tmp_path)
    assert "21 documents added" in printed
    reused = [int(tokens) for tokens in re.findall(r"(\d+) reused", printed)]
    assert len(reused) == 2
    assert reused[0] == 0 < reused[1]
    assert "handbook/purifier-willow-a3.md" in printed
    assert "9 months" in printed
    assert "The answer is no" in printed


@pytest.mark.slow
def test_an_engine_of_ones_own(demo_model: Path, tmp_path: Path) -> None:
    printed = run_example("own_retriever.py", tmp_path)
    assert "45 minutes" in printed
    assert "1.7 litres" in printed
    first, second = re.findall(r"^  (.+)$", printed, re.MULTILINE)
    assert first.count("computed") == 2
    assert second.count("reused") + second.count("exact") >= 1


@pytest.mark.slow
def test_a_chain_of_langchains(demo_model: Path, tmp_path: Path) -> None:
    printed = run_example("langchain_runnable.py", tmp_path)
    assert "9 months" in printed
    assert "52 square metres" in printed
    reused = [int(tokens) for tokens in re.findall(r"(\d+) reused", printed)]
    assert len(reused) == 2
    assert reused[0] == 0 < reused[1]


@pytest.mark.slow
def test_llama_index_with_one_line_swapped_and_without_a_network(
    demo_model: Path, tmp_path: Path
) -> None:
    printed = run_example("llama_index_query_engine.py", tmp_path, prepare=OFFLINE)
    reused = [int(tokens) for tokens in re.findall(r"(\d+) tokens reused", printed)]
    assert len(reused) == 2
    assert reused[0] == 0 < reused[1]
    assert "purifier-willow-a3.md" in printed
    assert "9 months" in printed
    assert "52 square metres" in printed


def test_the_guard_against_the_network_bites(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import urllib.request\nurllib.request.urlopen('http://localhost:9/')")
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE + RUN, script], capture_output=True, text=True, timeout=300
    )
    assert "not offline: socket" in done.stderr


@pytest.mark.parametrize(
    "path",
    sorted(set(EXAMPLES.glob("*.py")) - set(EXAMPLES.glob("*_bench.py"))),
    ids=lambda path: path.name,
)
def test_examples_use_public_names_alone(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    is_app = path.name.startswith("streamlit_")
    imported = re.findall(r"^(?:from|import) (cachecraft_rag\S*)", source, re.MULTILINE)
    assert imported or is_app  # a part of an app may need none
    # it cuts answers as the commands do
    allowed = PUBLIC | {"cachecraft_rag.cli.first_sentence"} if is_app else PUBLIC
    assert set(imported) <= allowed


@pytest.mark.parametrize("name", ["litellm_proxy", "open_webui"])
def test_programs_around_applications_say_what_they_need(name: str) -> None:
    """`tests/vllm/test_applications.py` runs them."""
    program = [sys.executable, EXAMPLES / "applications" / f"{name}.py"]
    helped = subprocess.run([*program, "--help"], capture_output=True, text=True, timeout=300)
    assert helped.returncode == 0, helped.stderr
    assert "--server" in helped.stdout
    # port 9 is that of the protocol "discard", which nothing serves
    command = [*program, "--server", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "cachecraft serve demo --reuse-plain-prompts" in done.stderr


def test_the_compose_file_starts_replicas_as_the_command_allows() -> None:
    """Servers and router are tested in tests/vllm/test_replicas.py."""
    folder = EXAMPLES / "replicas"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    replicas = {name: one for name, one in services.items() if name.startswith("replica-")}
    assert len(replicas) == 2
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    for name, one in replicas.items():
        command = shlex.split(one["command"].replace("${MODEL:-Qwen/Qwen3-8B}", "Qwen/Qwen3-8B"))
        with group.commands["serve"].make_context("serve", command) as context:
            given = context.params
        assert (given["model"], given["session_header"]) == ("Qwen/Qwen3-8B", "X-Session")
        assert f"{name}:{given['port']}" in services["router"]["environment"]["REPLICAS"].split()
        assert (folder / one["build"]["context"] / "Dockerfile").is_file()
    assert len({one["volumes"][1] for one in replicas.values()}) == 2  # each has its own store
    assert "X-Session" in (folder / "Caddyfile").read_text()
