"""The programs of examples/applications, around a server with the demo model; they print what was reused.

LiteLLM and Open WebUI live in environments of their own: name their Python in LITELLM_PYTHON and OPEN_WEBUI_PYTHON.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.vllm.http_server import ServerProcess

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "applications"


@pytest.fixture(scope="module")
def server(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("applications")
    made = ServerProcess(
        model_folder("demo"),
        folder / "store",
        folder / "log",
        "--reuse-plain-prompts",
        "--",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
        settings={"CACHECRAFT_NEW_VARIANTS": "idle"},
    )
    yield made
    made.stop()


def tables(python: str, name: str, server: ServerProcess, folder: Path) -> list[list[list[int]]]:
    """Run a program; return the first four columns of each table that it prints."""
    command = [python, str(FOLDER / f"{name}.py"), "--server", server.url]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[list[list[int]]] = []
    for line in done.stdout.splitlines():
        words = line.split()
        if not words:
            found.append([])
        elif words[0].isdigit():
            found[-1].append([int(word) for word in words[:4]])
    return found


def python_of(variable: str) -> str:
    """Return the Python that a variable of the environment names, or skip the test."""
    if not (python := os.environ.get(variable)):
        pytest.skip(f"{variable} names no Python; see examples/applications")
    return python


@pytest.mark.slow
def test_litellm_passes_documents_and_cached_tokens(server: ServerProcess, tmp_path: Path) -> None:
    documents, unmarked = tables(python_of("LITELLM_PYTHON"), "litellm_proxy", server, tmp_path)
    for rows in (documents, unmarked):
        assert [len(rows), rows[0][1]] == [3, 0]
        assert rows[2][1] >= rows[2][0] / 3
        assert all(cached == reused for _, cached, reused, _ in rows)
    assert documents[1][1] >= documents[1][0] / 3


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("langgraph") is None, reason="pip install langgraph")
def test_langgraphs_agent_reuses_results_of_tools(server: ServerProcess, tmp_path: Path) -> None:
    first, second = tables(sys.executable, "langgraph_agent", server, tmp_path)
    assert [len(first), len(second)] == [3, 3]
    assert second[0][2] > 0  # passages that another conversation has read


@pytest.mark.slow
def test_open_webui_reuses_passages_the_third_time(server: ServerProcess, tmp_path: Path) -> None:
    (rows,) = tables(python_of("OPEN_WEBUI_PYTHON"), "open_webui", server, tmp_path)
    assert len(rows) == 4
    cached = [row[1] for row in rows]
    assert 0 == cached[0] < cached[1] < cached[2] < cached[3]
    # passages that never stood in this order; before, vLLM's prefix cache held more
    assert [row[2] > 0 for row in rows] == [False, False, False, True]
