"""Several tenants on one server: nothing crosses, and only administrators change what others use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cachecraft_rag.client.http import HTTPEngine
from cachecraft_rag.compute.driver import Until
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, ServerError, UnsupportedCallError
from cachecraft_rag.server.remembered import Remembered
from cachecraft_rag.server.settings import EndpointSettings
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.captures import Capture
from cachecraft_rag.types.documents import Chunk
from tests.server.conftest import DOCUMENTS, QUESTION, TEXTS, Served

Serve = Callable[..., Served]
HEADER = "X-Tenant"
ADMIN = {"X-CacheCraft-Admin-Key": "admin"}
IDS = [Chunk(text).chunk_id for text in TEXTS]


@pytest.fixture
def shared(serve: Serve) -> Served:
    """A server with tenants and sessions, and an admin key."""
    names = {"tenant_header": HEADER, "session_header": "X-Session", "admin_keys": ("admin",)}
    return serve(settings=names, new_variants="idle")


def of(tenant: str, **more: str) -> dict[str, str]:
    return {HEADER: tenant} | more


def reused(reply: httpx.Response) -> int:
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def held(served: Served, tenant: str) -> int:
    body = {"chunk_ids": IDS}
    reply = served.post("/v1/cachecraft/holds", body, headers=of(tenant))
    return int(reply.json()["tokens"])


def test_tenants_with_the_same_documents_share_nothing(shared: Served) -> None:
    assert reused(shared.chat(documents=DOCUMENTS, headers=of("acme"))) == 0
    shared.engine.settle()
    assert held(shared, "acme") > 0
    assert held(shared, "bolt") == 0
    assert reused(shared.chat(documents=DOCUMENTS, headers=of("bolt"))) == 0
    assert reused(shared.chat(documents=DOCUMENTS, headers=of("acme"))) > 0
    # in another order some chunks are fixed, and captured once more while the engine is idle
    for tenant in ("acme", "bolt"):
        assert reused(shared.chat(documents=DOCUMENTS[::-1], headers=of(tenant))) > 0
    shared.engine.settle()
    rows = namespaces(shared.engine)
    assert set(rows) == {"acme", "bolt"}
    assert rows.count("acme") == rows.count("bolt") > len(DOCUMENTS)


def namespaces(engine: Engine) -> list[str]:
    store = engine.store
    assert isinstance(store, ChunkCacheStore)
    return [row.variant.key.namespace for row in store.rows()]


def test_passages_of_unmarked_text_are_found_by_their_tenant_alone(shared: Served) -> None:
    pages = [
        " ".join(f"Part {number} of the {name} is cleaned." for number in range(24))
        for name in ("kettle", "grinder")
    ]
    documents = [{"text": page} for page in pages]
    assert reused(shared.chat(documents=documents, headers=of("acme"))) == 0
    shared.engine.settle()
    text = "\n\n".join([*pages[::-1], QUESTION[0]["content"]])
    plain = [{"role": "user", "content": text}]

    def ask(tenant: str) -> int:
        tokens = reused(shared.chat(messages=plain, headers=of(tenant)))
        shared.engine.settle()
        return tokens

    assert ask("bolt") < 64  # the template's beginning
    assert ask("acme") > 256
    ask("bolt")  # the second time it is captured, for this tenant
    assert ask("bolt") > 256
    assert ask("cobalt") < 64


def test_statistics_are_those_of_the_tenants_own_request(shared: Served) -> None:
    for expected in ("computed", "exact"):
        sent = of("acme", **{"X-Session": "ann"})
        name = shared.chat(documents=DOCUMENTS, headers=sent).json()["id"]
        url = f"{shared.url}/v1/cachecraft/requests/{name}"
        outcomes = [
            (chunk["chunk_id"], chunk["outcome"])
            for chunk in httpx.get(url, headers=sent).json()["stats"]["chunks"]
        ]
        assert sorted(outcomes) == sorted((name, expected) for name in IDS)
        assert httpx.get(url, headers=of("bolt", **{"X-Session": "ann"})).status_code == 404
        assert httpx.get(url, headers=of("acme")).status_code == 404
        shared.engine.settle()


def test_two_tenants_may_give_their_answers_the_same_id() -> None:
    remembered = Remembered()
    for tenant in ("acme", "bolt"):
        remembered.keep("chatcmpl-1", (tenant, None), {"tenant": tenant})
    for tenant in ("acme", "bolt"):
        assert remembered.get("chatcmpl-1", owner=(tenant, None)) == {"tenant": tenant}
    assert remembered.get("chatcmpl-1", owner=("acme", "ann")) is None


def test_a_request_waits_for_no_captures_of_another_tenant(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait would say that another tenant has sent the same text."""
    store = shared.engine.store
    assert isinstance(store, ChunkCacheStore)
    put = store.put
    stored = threading.Event()

    def slow_put(capture: Capture) -> Any:
        return Until(stored.is_set) if capture.key.namespace == "acme" else put(capture)

    monkeypatch.setattr(store, "put", slow_put)
    assert reused(shared.chat(documents=DOCUMENTS, headers=of("acme"))) == 0
    assert reused(shared.chat(documents=DOCUMENTS, headers=of("bolt"))) == 0
    assert not stored.is_set()
    stored.set()
    assert shared.engine.settle(60)


def test_an_administrator_primes_and_evicts_for_one_tenant(shared: Served) -> None:
    def act(path: str, body: dict[str, Any], tenant: str) -> Any:
        reply = shared.post(f"/v1/cachecraft/{path}", body, headers=of(tenant) | ADMIN)
        assert reply.status_code == 200, reply.text
        return reply.json()

    captured = [act("prime", {"documents": DOCUMENTS}, tenant) for tenant in ("acme", "bolt")]
    assert captured[0] == captured[1]
    estimate = act("prime", {"documents": DOCUMENTS, "estimate": True}, "cobalt")
    assert len(estimate["missing"]) == captured[0]["captured"] > len(DOCUMENTS)
    assert act("prime", {"documents": DOCUMENTS, "estimate": True}, "acme")["missing"] == {}
    assert act("evict", {"chunk_ids": IDS, "removed": True}, "acme")["variants"] >= len(IDS)
    assert (held(shared, "acme"), held(shared, "bolt") > 0) == (0, True)
    assert act("readmit", {"chunk_ids": []}, "acme")["removed"] == sorted(IDS)
    assert act("readmit", {"chunk_ids": []}, "bolt")["removed"] == []


def bad_headers() -> Iterator[list[tuple[str, str]]]:
    yield []
    for tenant in ("", "../acme", ".acme", "-acme", "a" * 65, "acme, bolt", "acme\tx", "über"):
        yield [(HEADER, tenant)]
    yield [(HEADER, "acme"), (HEADER.lower(), "bolt")]


@pytest.mark.parametrize("sent", list(bad_headers()))
def test_a_request_without_one_safe_tenant_is_refused(
    shared: Served, sent: list[tuple[str, str]]
) -> None:
    encoded = [(name.encode(), value.encode()) for name, value in sent]
    reply = shared.chat(documents=DOCUMENTS, headers=encoded)
    assert reply.status_code == 400
    assert HEADER in reply.json()["error"]["message"]
    prime = [*encoded, (b"X-CacheCraft-Admin-Key", b"admin")]
    reply = shared.post("/v1/cachecraft/prime", {"documents": DOCUMENTS}, headers=prime)
    assert reply.status_code == 400


def test_a_session_that_is_sent_twice_is_refused(shared: Served) -> None:
    sent = [(HEADER, "acme"), ("X-Session", "ann"), ("X-Session", "bob")]
    assert shared.chat(documents=DOCUMENTS, headers=sent).status_code == 400


def test_a_client_names_no_tenant_of_a_server(serve: Serve) -> None:
    with (
        HTTPEngine.connect(serve().url) as engine,
        pytest.raises(UnsupportedCallError, match="--tenant-header"),
    ):
        engine.for_tenant("acme")


def test_tenants_and_sessions_need_two_headers() -> None:
    with pytest.raises(ConfigError, match="two headers"):
        EndpointSettings(tenant_header="X-Who", session_header="x-who")


def test_without_admin_keys_no_client_changes_what_others_use(serve: Serve) -> None:
    served = serve(settings={"admin_keys": ()})
    for path, body in (
        ("prime", {"documents": DOCUMENTS}),
        ("evict", {"chunk_ids": IDS}),
        ("evict", {"chunk_ids": IDS, "removed": True}),
        ("readmit", {"chunk_ids": IDS}),
    ):
        reply = served.post(f"/v1/cachecraft/{path}", body, headers=ADMIN)
        assert reply.status_code == 403, path
        assert "--admin-key-file" in reply.json()["error"]["message"]
    with (
        HTTPEngine.connect(served.url) as engine,
        pytest.raises(ServerError, match="start it with --admin-key-file"),
    ):
        engine.remove(TEXTS)
    assert EndpointSettings().admin_keys == ()
