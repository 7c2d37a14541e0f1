"""The end of a server's start: what to do next. Needs no vLLM."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachecraft_rag.server.ready import announce, first_request, ready_text
from cachecraft_rag.server.settings import EndpointSettings


def arguments(**changed: Any) -> Any:
    given = {
        "host": "127.0.0.1",
        "port": 8000,
        "uds": None,
        "ssl_certfile": None,
        "api_key": None,
        "served_model_name": ["demo"],
        "model": "/models/demo",
    }
    return SimpleNamespace(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "address"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0", "port": 80}, "http://127.0.0.1:80"),
        ({"host": None, "ssl_certfile": "cert.pem"}, "https://127.0.0.1:8000"),
        ({"host": "::"}, "http://[::1]:8000"),
        ({"host": "gpu-1"}, "http://gpu-1:8000"),
        ({"uds": "/run/my server"}, "http://localhost"),
    ],
)
def test_the_first_request_names_the_server_s_address(
    changed: dict[str, Any], address: str
) -> None:
    words = shlex.split(first_request(arguments(**changed)))
    assert words[:2] == ["curl", f"{address}/v1/chat/completions"]
    assert ("/run/my server" in words) == ("uds" in changed)


@pytest.mark.parametrize(
    ("changed", "model"),
    [
        ({}, "demo"),
        ({"served_model_name": None}, "/models/demo"),
        ({"served_model_name": 'it\'s "mine"'}, 'it\'s "mine"'),
    ],
)
def test_the_first_request_names_the_served_model(changed: dict[str, Any], model: str) -> None:
    words = shlex.split(first_request(arguments(**changed)))
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == model
    assert body["documents"]


def test_the_first_request_shows_where_a_key_goes() -> None:
    assert "Bearer" not in first_request(arguments())
    assert "Bearer YOUR-KEY" in first_request(arguments(), needs_key=True)
    with_key = first_request(arguments(api_key=["secret"]))
    assert "Bearer YOUR-KEY" in with_key
    assert "secret" not in with_key


def test_the_first_request_shows_where_a_tenant_goes() -> None:
    settings = EndpointSettings(tenant_header="X-Tenant", admin_keys=("key",))
    words = shlex.split(ready_text(arguments(), settings).partition("terminal:")[2])
    assert words[words.index("X-Tenant: YOUR-TENANT") - 1] == "-H"


def test_a_server_that_is_closed_to_administrators_says_so_when_it_is_ready() -> None:
    closed = ready_text(arguments(), EndpointSettings())
    assert "primes and evicts for no client: start it with --admin-key-file." in closed
    for keys in (None, ("key",)):
        assert "--admin-key-file" not in ready_text(arguments(), EndpointSettings(admin_keys=keys))


@pytest.mark.parametrize("note", ["", "prompts are filled layer by layer: of this test"])
def test_ready_is_logged_once_the_server_accepts_connections(
    note: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "cachecraft_rag.server")
    args = arguments(uds=str(tmp_path / "socket"))

    async def start() -> None:
        waiting = asyncio.create_task(announce(args, EndpointSettings(admin_keys=None), note=note))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not caplog.records
        accepted = asyncio.Event()

        def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()
            accepted.set()

        server = await asyncio.start_unix_server(accept, args.uds)
        await waiting
        await accepted.wait()
        server.close()
        await server.wait_closed()

    asyncio.run(start())
    (line,) = caplog.messages
    assert line.startswith(f"Ready. Note: {note}." if note else "Ready. A question")
    assert line.endswith(first_request(args))


def test_serve_without_vllm_says_at_once_how_to_install_it(tmp_path: Path) -> None:
    """Neither torch nor transformers is imported for that, nor the model read."""
    code = (
        "import sys\n"
        "sys.modules['vllm'] = None\n"
        "from cachecraft_rag.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print(sorted({'torch', 'transformers'} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", code, "serve", "no/such-model", "--backend", "vllm"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stdout.strip() == "[]"
    assert done.stderr.startswith("error: ")
    assert "in a checkout: pip install '.[vllm]'" in done.stderr
