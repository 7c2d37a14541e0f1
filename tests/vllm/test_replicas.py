"""Two servers with nothing in common but a Redis, and the router before them: captures are shared, sessions stay.

The first server has two tensor-parallel ranks.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from cachecraft_rag.store.remote import RemoteConfig, RemoteTier
from cachecraft_rag.types.documents import Chunk
from tests.store.remote.conftest import Server, make_redis
from tests.vllm.conftest import TEXTS
from tests.vllm.http_server import START_S, ServerProcess

__all__ = ["make_redis"]  # a fixture
CADDYFILE = Path(__file__).resolve().parents[2] / "examples/replicas/Caddyfile"
LOOSE = {
    "method": {"alpha": 0.5, "probe_min_rows": 0, "loading": "whole"},
    "capture": False,
}


@pytest.mark.slow
def test_a_second_replica_reuses_what_the_first_has_captured(
    model_folder: Callable[[str], Path],
    make_redis: Callable[..., Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOOKUP", "CONNECT", "READ", "PUT"):  # a busy machine is no failure
        monkeypatch.setenv(f"CACHECRAFT_REMOTE_TUNING_{name}_TIMEOUT_S", "120")
    url = f"redis://127.0.0.1:{make_redis().port}/0"
    options = ("--max-model-len", "2048", "--remote", url)
    servers = []
    try:
        for name, ranks in (("first", "2"), ("second", "1")):
            (tmp_path / name).mkdir()
            log, own = tmp_path / name / "log", (*options, "--tensor-parallel-size", ranks)
            servers.append(
                ServerProcess(model_folder("Llama"), tmp_path / name / "store", log, *own)
            )
        first, second = servers
        documents = [{"text": text} for text in TEXTS[:3]]
        cold = first.chat(documents).json()
        await_sent(first, url, [Chunk(text).chunk_id for text in TEXTS[:3]])
        # The same prompt again, apart from vLLM's own prefix cache: other settings have another salt.
        warm = first.chat(documents, cachecraft=LOOSE).json()
        assert (outcomes(cold), outcomes(warm)) == (["computed"] * 3, ["exact"] * 3)
        assert warm["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
        answers = [one.chat(documents[::-1], cachecraft=LOOSE).json() for one in servers]
        here, there = (one["kv_transfer_params"]["cachecraft"]["stats"] for one in answers)
        assert {chunk["tier"] for chunk in here["chunks"]} <= {"host", "disk"}
        assert ({chunk["tier"] for chunk in there["chunks"]}, there["remote"]) == (
            {"remote"},
            "answered",
        )
        fields = ("chunk_id", "outcome", "variant_id", "recomputed")
        assert [[one[name] for name in fields] for one in there["chunks"]] == [
            [one[name] for name in fields] for one in here["chunks"]
        ]
        assert "reused" in outcomes(answers[1])
        assert set(outcomes(answers[1])) <= {"exact", "reused"}
        assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]
        with router(servers, tmp_path) as url:
            assert_sessions_stay(url, first)
        again = second.chat(documents[1:], cachecraft=LOOSE | {"recompute_ratio": 0.3}).json()
        assert set(outcomes(again)) <= {"exact", "reused"}
    finally:
        for one in servers:
            one.stop()


@contextmanager
def router(servers: list[ServerProcess], folder: Path) -> Iterator[str]:
    """The router of examples/replicas before these servers; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    replicas = " ".join(one.url.removeprefix("http://") for one in servers)
    caddy = Path(sys.executable).with_name("caddy")
    environment = {"LISTEN": url, "REPLICAS": replicas, "HOME": str(folder)}
    with (folder / "router").open("w") as log:
        process = subprocess.Popen(
            [caddy, "run", "--config", CADDYFILE], env=environment, stderr=log
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, (folder / "router").read_text()
            assert time.monotonic() < deadline, (folder / "router").read_text()
            try:
                if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                    break
            except httpx.HTTPError:  # it does not listen yet
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def assert_sessions_stay(url: str, first: ServerProcess) -> None:
    """Each session is answered by one replica, not all by the same, and by the other one when that has died."""
    asked = {
        "messages": [{"role": "user", "content": "How?"}],
        "max_tokens": 1,
        "documents": [{"text": TEXTS[0]}],
    }

    def replica(session: int) -> str:
        headers = {"X-Session": f"session {session}"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, headers=headers, timeout=600)
        assert answer.status_code == 200, answer.text
        return answer.headers["X-Replica"]

    homes = [replica(session) for session in range(32)]
    assert len(set(homes)) == 2  # by chance all at one of two: once in two billion runs
    assert [replica(session) for session in range(32)] == homes
    first.kill()  # what it has sent outlives it
    (other,) = set(homes) - {first.url.removeprefix("http://")}
    assert {replica(session) for session in range(32)} == {other}


def await_sent(server: ServerProcess, remote: str, chunk_ids: list[str]) -> None:
    """Captures are stored, and sent, in the background."""
    facts = httpx.get(f"{server.url}/v1/cachecraft", timeout=60).json()
    deadline = time.monotonic() + 300
    with RemoteTier(RemoteConfig(remote).with_tuning(lookup_timeout_s=30.0)) as tier:
        while not all(
            tier.find(facts["namespace"], facts["fingerprint"], chunk_ids).variants.values()
        ):
            assert time.monotonic() < deadline, server.counts()
            time.sleep(0.2)


def outcomes(answer: dict[str, Any]) -> list[str]:
    return [
        chunk["outcome"] for chunk in answer["kv_transfer_params"]["cachecraft"]["stats"]["chunks"]
    ]
