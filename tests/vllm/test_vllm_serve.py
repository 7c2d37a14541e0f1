"""vLLM's own command with this package's plugins: settings from the environment, and no key on a command line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.vllm.settings import ConnectorSettings
from tests.vllm.conftest import TEXTS
from tests.vllm.http_server import ServerProcess
from tests.vllm.test_http import await_rows, stats_in

DOCUMENTS = [{"text": text} for text in TEXTS[:3]]
IDS = [Chunk(text).chunk_id for text in TEXTS[:3]]
CONNECTOR = {
    "kv_connector": "CacheCraftConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"session_header": "X-Mine"},
}


class VLLMProcess(ServerProcess):
    """The server that `vllm serve` starts; in the CPU build vLLM's command itself does not run."""

    def command(self, model: Path | str, port: int, options: tuple[str, ...]) -> list[str]:
        module = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        return [sys.executable, *module, "--port", str(port), *options]


@pytest.fixture(scope="module")
def server(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served")
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
    }
    own = CONNECTOR | {
        "kv_connector_extra_config": {"session_header": "X-Mine", "client_settings": "none"}
    }
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [own, example]},
    }
    settings = {
        "VLLM_PLUGINS": "cachecraft,cachecraft_http",
        "CACHECRAFT_STORE": str(folder / "store"),
        "CACHECRAFT_REUSE_RECOMPUTE_RATIO": "1",
    }
    options = ("--kv-transfer-config", json.dumps(transfer), "--max-model-len", "2048")
    options += ("--served-model-name", "m", "--dtype", "float32")
    made = VLLMProcess(
        model_folder("Llama"), folder / "store", folder / "log", *options, settings=settings
    )
    yield made
    made.stop()


def test_documents_are_reused_with_equal_texts_beside_another_connector(
    server: ServerProcess,
) -> None:
    facts = httpx.get(f"{server.url}/v1/cachecraft").json()
    assert (facts["model"], facts["session_header"]) == ("m", "X-Mine")
    answers = [server.chat(DOCUMENTS[::step]).json() for step in (1, -1)]
    body = {"chunk_ids": IDS}

    def held() -> bool:
        reply = httpx.post(f"{server.url}/v1/cachecraft/holds", json=body).json()
        return all(chunk["tokens"] for chunk in reply["chunks"])

    await_rows(held)
    for answer, step in zip(answers, (1, -1), strict=True):
        again = server.chat(DOCUMENTS[::step], cache_salt="another").json()
        assert all(chunk["outcome"] != "computed" for chunk in stats_in(again)["chunks"])
        assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    example = server.store.parent / "example"
    assert any(example.iterdir())  # the other connector has saved blocks, too


def test_one_key_signs_requests_in_all_processes_and_is_on_no_command_line(
    server: ServerProcess,
) -> None:
    group = os.getpgid(server.pid)
    processes = [path for path in Path("/proc").glob("[0-9]*") if in_group(path, group)]
    keys = {
        entry.partition(b"=")[2].decode()
        for path in processes
        for entry in (path / "environ").read_bytes().split(b"\0")
        if entry.startswith(b"CACHECRAFT_SEAL_KEY")
    }
    lines = [(path / "cmdline").read_text() for path in processes]
    assert len(keys) == 1  # the same in all processes
    assert not any(key in line for key in keys for line in lines)
    admin = httpx.post(f"{server.url}/v1/cachecraft/evict", json={"chunk_ids": IDS})
    assert admin.status_code == 403


def in_group(process: Path, group: int) -> bool:
    try:
        return os.getpgid(int(process.name)) == group
    except ProcessLookupError:  # it has just ended
        return False


@pytest.mark.parametrize(
    ("transfer", "advice"),
    [
        ({"kv_connector": "OffloadingConnector"}, "cachecraft serve"),
        ({"kv_connector": "MultiConnector"}, "cachecraft serve"),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {
                    "connectors": [{"kv_connector": "OffloadingConnector"}, CONNECTOR]
                },
            },
            "the first one of MultiConnector",
        ),
        (CONNECTOR, "VLLM_PLUGINS=cachecraft,cachecraft_http"),
    ],
)
def test_a_config_without_what_reuse_needs_is_refused(
    monkeypatch: pytest.MonkeyPatch, transfer: dict[str, Any], advice: str
) -> None:
    from vllm.config import KVTransferConfig

    monkeypatch.delenv("CACHECRAFT_SEAL_KEY", raising=False)
    config = KVTransferConfig(**{"kv_role": "kv_both"} | transfer)
    running: Any = SimpleNamespace(kv_transfer_config=config)
    with pytest.raises(ConfigError, match=advice):
        ConnectorSettings.of(running)
