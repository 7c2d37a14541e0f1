"""`cachecraft serve` as a process without vLLM: its first lines, its end by a signal, and what it refuses."""

from __future__ import annotations

import builtins
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from typer.testing import CliRunner

from cachecraft_rag.cli.app import app
from cachecraft_rag.errors import ConfigError, ModelNotFoundError
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.store.config import CACHE_FOLDER
from cachecraft_rag.types.documents import chunk_id_of

if TYPE_CHECKING:
    from cachecraft_rag.model.decoder import Decoder

DOCUMENT = "Empty the kettle before you descale it with vinegar; rinse it twice."


@dataclass
class ServerProcess:
    """A running `cachecraft serve`; `lines` are those of its log before it was ready."""

    url: str
    store: Path
    lines: list[str]
    process: subprocess.Popen[str]

    def ended_by(self, number: int) -> int:
        """Send a signal and wait until the process has ended; returns its exit code."""
        self.process.send_signal(number)
        self.process.communicate(timeout=120)
        return self.process.returncode


@pytest.fixture(scope="module")
def folder(tiny_decoder: Callable[..., Decoder], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model."""
    made = tmp_path_factory.mktemp("model")
    decoder = tiny_decoder("Llama", max_position_embeddings=8192)
    decoder.model.save_pretrained(made)
    decoder.tokenizer.save_pretrained(made)
    return made


@contextmanager
def serving(
    model: Path | str,
    store: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    log: tuple[str, ...] = ("--log-json",),
    backend: str = "local",
) -> Iterator[ServerProcess]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("cachecraft")), *log, "serve", str(model)]
    command += ["--store", str(store), "--port", str(port), "--backend", backend, *options]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=store.parent,
    )
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if "Ready." in line:
                break
        assert process.poll() is None, "".join(lines)
        yield ServerProcess(f"http://127.0.0.1:{port}", store, lines, process)
    finally:
        process.kill()
        process.communicate()


def ask(served: ServerProcess, **body: Any) -> httpx.Response:
    asked = {"messages": [{"role": "user", "content": "How?"}], "documents": [{"text": DOCUMENT}]}
    url = f"{served.url}/v1/chat/completions"
    return httpx.post(url, json={**asked, "max_tokens": 4, **body}, timeout=120)


@contextmanager
def streaming(served: ServerProcess, *, max_tokens: int) -> Iterator[Iterator[str]]:
    """The further lines of a streamed answer that has begun."""
    body = {
        "messages": [{"role": "user", "content": "How?"}],
        "documents": [{"text": DOCUMENT}],
        "max_tokens": max_tokens,
        "stream": True,
    }
    url = f"{served.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as reply:
        lines = reply.iter_lines()
        assert "assistant" in next(lines)
        yield lines


def stored(store: Path) -> int:
    """Variants of the document in a store."""
    with ChunkCacheStore.open(store / CACHE_FOLDER) as opened:
        return opened.evict(RowFilter(chunk_ids=(chunk_id_of(DOCUMENT),))).variants


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_stream_ends_the_server_cleanly_and_keeps_captures(
    folder: Path, tmp_path: Path, number: int
) -> None:
    with serving(folder, tmp_path / "store") as served, streaming(served, max_tokens=7000):
        assert served.ended_by(number) == 0
    assert stored(tmp_path / "store") == 1


def test_an_answer_under_way_arrives_whole_although_the_server_was_asked_to_end(
    folder: Path, tmp_path: Path
) -> None:
    with serving(folder, tmp_path / "store") as served:
        with streaming(served, max_tokens=64) as lines:
            served.process.send_signal(signal.SIGTERM)
            assert "data: [DONE]" in list(lines)
        served.process.communicate(timeout=120)
        assert served.process.returncode == 0


def test_the_first_lines_say_which_engine_serves_and_how_to_ask(
    folder: Path, tmp_path: Path
) -> None:
    key = {"CACHECRAFT_API_KEY": "secret"}
    options = ("--max-tokens", "6")
    # vLLM is not installed where this runs, see `tests/vllm`
    with serving(folder, tmp_path / "store", *options, env=key, backend="auto") as served:
        assert "engine in this process" in served.lines[0]
        assert "--backend vllm" in served.lines[0]
        assert "curl" in served.lines[-1]
        assert "Bearer YOUR-KEY" in served.lines[-1]
        assert "secret" not in "".join(served.lines)
        assert ask(served).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        url = f"{served.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=120).json()
        assert answer["usage"]["completion_tokens"] <= 6  # the server's own --max-tokens
        assert answer["model"] == str(folder)
        assert served.ended_by(signal.SIGTERM) == 0


def test_the_first_request_can_be_copied_from_a_narrow_terminal(
    folder: Path, tmp_path: Path
) -> None:
    with serving(folder, tmp_path / "store", env={"COLUMNS": "60"}, log=()) as served:
        assert served.process.stderr is not None
        command = ""
        while not command.endswith("}'"):
            command += served.process.stderr.readline().rstrip("\n") + "\n"
            command = command if not command.endswith("}'\n") else command[:-1]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0


@pytest.mark.slow
def test_the_demo_model_reuses_documents_that_are_sent_a_third_time(
    demo_model: Path, handbook: Path, tmp_path: Path
) -> None:
    import openai

    pages = [{"text": page.read_text()[:1500]} for page in sorted(handbook.glob("*.md"))[:3]]
    with serving("demo", tmp_path / "store") as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=300)
        shares = []
        for question in ("Who repairs it?", "How often?", "What does it cost?"):
            answer = client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": question}],
                max_tokens=4,
                extra_body={"documents": pages},
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached = answer.usage.prompt_tokens_details.cached_tokens or 0
            shares.append(cached / answer.usage.prompt_tokens)
    assert shares[0] == 0
    assert shares[2] > 0.9


def command(*arguments: str) -> str:
    return CliRunner().invoke(app, ["serve", *arguments], catch_exceptions=False).output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "ollama"], "--backend"),
        (["--backend", "local", "-tp", "2"], "--tensor-parallel-size needs vLLM"),
        (["--backend", "local", "--max-model-len", "99"], "--max-model-len needs vLLM"),
        (["--backend", "local", "--client-settings", "some"], "client_settings"),
        (["--backend", "local", "--", "--enforce-eager"], "arguments after -- are vLLM's"),
    ],
)
def test_options_that_the_local_engine_does_not_have_are_refused(
    options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        command("demo", *options)


def test_reuse_plain_prompts_takes_precedence_over_a_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CACHECRAFT_REUSE_PLAIN_PROMPTS", "off")
    options = ["--backend", "local", "--search-system"]
    with pytest.raises(ConfigError, match="add --reuse-plain-prompts"):
        command("demo", *options)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen"):
            command("demo", *options, "--reuse-plain-prompts", "--port", port)


def test_a_port_that_is_taken_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            command("no/such/model", "--backend", "local", "--port", port)
    with pytest.raises(ModelNotFoundError):
        command("./nothing", "--backend", "local", "--port", port, "-s", str(tmp_path))


def test_without_the_web_server_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "uvicorn":
            raise ImportError("No module named 'uvicorn'")
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'cachecraft-rag\[serve\]'"):
        command("demo", "--backend", "local")


def test_help_and_errors_do_not_import_the_server() -> None:
    code = (
        "import json, sys; from cachecraft_rag.cli import serve; "
        "print(json.dumps([n for n in ('torch', 'starlette', 'uvicorn', 'transformers') if n in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == []
