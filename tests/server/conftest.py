"""Real servers over engines with tiny models, on real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.prompt.builder import DEFAULT_SYSTEM
from cachecraft_rag.server.local.app import LocalServer
from cachecraft_rag.server.local.embeddings import Embeddings
from cachecraft_rag.server.settings import EndpointSettings
from cachecraft_rag.serving.sampling import SamplingParams
from tests.engines import make_engine, until

__all__ = ["make_engine"]

TEXTS = (
    "Empty the kettle before you descale it with vinegar; rinse it twice.",
    "The toaster has a crumb tray; pull it out to the left and shake it.",
    "Set the fridge to four degrees and leave room behind it for the air.",
)
DOCUMENTS = [{"text": text} for text in TEXTS]
QUESTION = [{"role": "user", "content": "How is the kettle descaled?"}]


@dataclass(frozen=True)
class Served:
    """A server that listens at `url`, over `engine`."""

    url: str
    engine: Engine

    def client(self, *, key: str = "none", **options: Any) -> openai.OpenAI:
        """OpenAI's own client; it does not repeat requests that fail."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=120, **options)

    def chat(self, *, documents: Any = None, **body: Any) -> httpx.Response:
        """A chat completion of at most eight tokens."""
        asked = {"messages": QUESTION, "max_tokens": 8, "temperature": 0}
        if documents is not None:
            asked["documents"] = documents
        headers = body.pop("headers", None)
        return self.post("/v1/chat/completions", asked | body, headers=headers)

    def metrics(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Metrics by name and values of labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def ended(self, outcome: str) -> float:
        """Number of requests that ended like this."""
        return self.metrics()["cachecraft_requests_total", (outcome,)]


@contextmanager
def running(server: LocalServer) -> Iterator[str]:
    """Answer requests in a thread; gives the server's address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(
            server.app(), log_config=None, lifespan="on", timeout_graceful_shutdown=1
        )
        serving = uvicorn.Server(config)
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: serving.started)
        try:
            yield url
        finally:
            serving.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def serve(make_engine: Callable[..., Engine], tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Serves a tiny model; options of the server, `settings` of its endpoint, and options of the engine."""
    with ExitStack() as opened:

        def start(
            *,
            settings: Any = None,
            server: Any = None,
            engine: Engine | None = None,
            **options: Any,
        ) -> Served:
            engine = engine or make_engine(**options)
            folder = tmp_path / "tokenizer"
            if not folder.is_dir():
                engine.decoder.tokenizer.save_pretrained(folder)
                engine.decoder.model.config.save_pretrained(folder)
            given: dict[str, Any] = {
                "system": options.get("system", DEFAULT_SYSTEM),
                "defaults": SamplingParams(max_new_tokens=16),
                "embeddings": Embeddings("all-MiniLM-L6-v2"),
                "folder": folder,
            }
            endpoint = EndpointSettings(
                **(
                    {"model": "tiny", "plain_prompts": "reuse", "admin_keys": None}
                    | (settings or {})
                )
            )
            made = LocalServer(engine, endpoint, **(given | (server or {})))
            return Served(opened.enter_context(running(made)), engine)

        yield start


@pytest.fixture
def server(serve: Callable[..., Served]) -> Served:
    """A server with usual settings."""
    return serve()
