"""Several tenants on one vLLM server: neither chunk-caches nor blocks of vLLM's prefix cache cross."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from cachecraft_rag.server.settings import EndpointSettings
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.vllm.server.endpoint import OtherRoutes
from tests.vllm.conftest import TEXTS
from tests.vllm.http_server import ServerProcess
from tests.vllm.test_http import await_rows, stats_in

HEADER = "X-Tenant"
ADMIN = "the key of the administrator"
DOCUMENTS = [{"text": text} for text in TEXTS[:3]]
IDS = [Chunk(text).chunk_id for text in TEXTS[:3]]


@pytest.fixture(scope="module")
def server(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "keys").write_text(ADMIN)
    options = ("--tenant-header", HEADER, "--admin-key-file", str(folder / "keys"))
    options += ("--reuse-plain-prompts", "--dtype", "float32")
    made = ServerProcess(model_folder("Llama"), folder / "store", folder / "log", *options)
    yield made
    made.stop()


def of(tenant: str) -> dict[str, str]:
    return {HEADER: tenant}


def namespaces(server: ServerProcess) -> list[str]:
    with ChunkCacheStore.open(server.store / "caches") as caches:
        rows = [row.variant.key for row in caches.rows()]
    return [key.namespace for key in rows if key.chunk_id in IDS]


def test_tenants_with_the_same_documents_share_no_chunk_cache(server: ServerProcess) -> None:
    answers = {}
    for tenant in ("acme", "bolt"):
        answer = server.chat(DOCUMENTS, headers=of(tenant)).json()
        outcomes = {chunk["outcome"] for chunk in stats_in(answer)["chunks"]}
        assert outcomes == {"computed"}, tenant
        await_rows(lambda tenant=tenant: namespaces(server).count(tenant) == len(IDS))
        answers[tenant] = answer["choices"][0]["token_ids"]
        url = f"{server.url}/v1/cachecraft/requests/{answer['id']}"
        assert httpx.get(url, headers=of(tenant)).json()["stats"] == stats_in(answer)
        assert httpx.get(url, headers=of("cobalt")).status_code == 404
    assert answers["acme"] == answers["bolt"]
    for tenant in ("acme", "bolt"):
        again = server.chat(DOCUMENTS[::-1], headers=of(tenant)).json()
        assert {chunk["outcome"] for chunk in stats_in(again)["chunks"]} <= {"exact", "reused"}
    held = [
        httpx.post(
            f"{server.url}/v1/cachecraft/holds", json={"chunk_ids": IDS}, headers=of(tenant)
        ).json()["tokens"]
        for tenant in ("acme", "bolt", "cobalt")
    ]
    assert held[0] == held[1] > held[2] == 0


def test_tenants_share_no_blocks_of_the_prefix_cache(server: ServerProcess) -> None:
    question = " ".join(f"Is rule {number} of the kettle still valid?" for number in range(40))

    def hits(tenant: str, documents: Any = None) -> float:
        before = server.metric("vllm:prefix_cache_hits_total")
        assert server.chat(documents, question, headers=of(tenant)).status_code == 200
        server.settles()
        return server.metric("vllm:prefix_cache_hits_total") - before

    assert hits("acme") == 0
    assert hits("acme") > 0
    assert hits("bolt") == 0
    long = [{"text": f"{number} {TEXTS[3] * 20}"} for number in range(2)]
    assert hits("cobalt", long) == 0
    assert hits("cobalt", long) > 0
    assert hits("dune", long) == 0


def test_an_administrator_primes_for_one_tenant_and_others_for_none(server: ServerProcess) -> None:
    body = {"documents": [{"text": TEXTS[4]}]}
    ids = {"chunk_ids": [Chunk(TEXTS[4]).chunk_id]}

    def post(path: str, sent: Any, headers: dict[str, str]) -> httpx.Response:
        url = f"{server.url}/v1/cachecraft/{path}"
        return httpx.post(url, json=sent, headers=headers, timeout=600)

    assert post("prime", body, of("acme")).status_code == 403
    admin = {"X-CacheCraft-Admin-Key": ADMIN}
    assert post("prime", body, admin).status_code == 400
    assert post("prime", body, admin | of("acme")).json()["captured"] >= 1
    assert post("holds", ids, of("acme")).json()["tokens"] > 0
    assert post("holds", ids, of("bolt")).json()["tokens"] == 0
    assert post("evict", ids, admin | of("bolt")).json()["variants"] == 0
    assert post("evict", ids, admin | of("acme")).json()["variants"] >= 1


def test_no_other_way_to_the_model_is_open(server: ServerProcess) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    for path in ("/v1/messages", "/v1/embeddings", "/inference/v1/generate"):
        reply = httpx.post(f"{server.url}{path}", json=asked, headers=of("acme"), timeout=600)
        assert reply.status_code == 403, path
        assert HEADER in reply.json()["error"]["message"]
    assert server.chat(None).status_code == 400
    assert server.chat(None, headers={HEADER: "../acme"}).status_code == 400
    assert httpx.get(f"{server.url}/v1/models").status_code == 200


@pytest.mark.parametrize("root", ["", "/model"])
def test_a_proxy_may_pass_a_path_below_its_own_on(root: str) -> None:
    """With --root-path, paths have that beginning if the proxy leaves it there."""
    app = FastAPI(root_path=root)
    settings = EndpointSettings(tenant_header=HEADER)
    app.state.cachecraft = SimpleNamespace(engine=SimpleNamespace(settings=settings))
    app.add_middleware(OtherRoutes)
    closed = ("/v1/messages", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    for path in ("/v1/chat/completions", *closed):
        app.add_api_route(path, lambda: "served", methods=["POST"])
    client = TestClient(app)
    for prefix in {"", root}:
        assert client.post(f"{prefix}/v1/chat/completions").status_code == 200, prefix
        for path in closed:
            refused = client.post(f"{prefix}{path}")
            assert refused.status_code == 403, prefix
            assert "--lora-modules" in refused.json()["error"]["message"]
