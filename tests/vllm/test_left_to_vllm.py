"""A request that is left to vLLM costs nothing of ours: no message, no signature, no look-up and no plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.server.settings import EndpointSettings
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.vllm.idle.audits import KEPT, PredictedAnswer
from cachecraft_rag.vllm.messages import FIELD, Ask
from cachecraft_rag.vllm.served_model import VLLMModel
from cachecraft_rag.vllm.server import unmarked
from cachecraft_rag.vllm.server.endpoint import ChatWithDocuments, Endpoint
from cachecraft_rag.vllm.server.message_places import TokenOffsets
from cachecraft_rag.vllm.server.server_engine import ServerEngine
from cachecraft_rag.vllm.settings import ConnectorSettings
from tests.vllm.test_message_places import SPOILS_USER, about

DOCUMENTS = [{"text": about(thing)} for thing in ("kettle", "toaster")]


class Handler:
    """vLLM's handler of chat completions: hands a prompt to the engine's client, and keeps what it was given."""

    exclude_tools_when_tool_choice_none = False

    def __init__(self, tokenizer: Any) -> None:
        self.engine_client = SimpleNamespace(generate=self._generate)
        self.given: list[dict[str, Any]] = []
        self.sent: list[dict[str, Any]] = []
        self.logprobs: list[int | None] = []  # number of likeliest tokens, for each prompt
        self.template: str | None = None  # in place of the tokenizer's
        self.adapter: str | None = None  # of the model that the request names
        self.asked: dict[str, Any] = {}  # parameters of sampling in place of the usual ones
        self.kind = "token"  # of the prompt: "multimodal" with images
        self._tokenizer = tokenizer

    async def _generate(
        self, prompt: Any, params: Any, *_: object, **__: object
    ) -> AsyncGenerator[Any]:
        self.sent.append(params.extra_args or {})
        self.logprobs.append(params.logprobs)
        yield SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    token_ids=[1], finish_reason="length", stop_reason=None, logprobs=None
                )
            ],
            metrics=None,
            kv_transfer_params=None,
            finished=True,
            num_cached_tokens=0,
        )

    async def create_chat_completion(self, request: Any, _: object) -> ErrorResponse:
        transfer = request.kv_transfer_params or {}
        self.given.append(dict(transfer))
        ids = transfer.pop("prompt_token_ids", None)
        prompt: dict[str, Any] = {"type": self.kind, "prompt_token_ids": ids}
        if ids is None:
            text = self._tokenizer.apply_chat_template(
                request.messages, chat_template=self.template, tokenize=False
            )
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            prompt |= {"prompt": text, "prompt_token_ids": ids}
        extra = {"kv_transfer_params": transfer} if transfer else None
        usual = {
            "n": 1,
            "prompt_logprobs": None,
            "extra_args": extra,
            "max_tokens": 1,
            "temperature": 0,
            "top_p": 1,
            "structured_outputs": None,
            "logprobs": None,
        }
        params = SimpleNamespace(**usual | self.asked)
        note = ""
        async for output in self.engine_client.generate(
            prompt, params, "request", lora_request=self.adapter
        ):
            note = (output.kv_transfer_params or {FIELD: {"note": ""}})[FIELD]["note"]
        error = ErrorInfo(message=str(note), type="of this test", code=400)
        return ErrorResponse(error=error)


@pytest.fixture
def made(
    tiny_decoder: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path
) -> Iterator[tuple[TestClient, Handler, ServerEngine]]:
    decoder = tiny_decoder("Llama")
    facts = (decoder.fingerprint, decoder.layout, decoder.context_length, frozenset())
    model = VLLMModel("tiny", None, byte_tokenizer, *facts)
    endpoint = EndpointSettings(plain_prompts="reuse")
    settings = ConnectorSettings(str(tmp_path), model.identity, EngineConfig(), endpoint=endpoint)
    calls: Any = SimpleNamespace(close=lambda: None)
    with ChunkCacheStore.open(tmp_path) as store:
        engine = ServerEngine(model, store, settings, calls=calls)
        cache: Any = SimpleNamespace(num_gpu_blocks=100, block_size=16, enable_prefix_caching=True)
        handler = Handler(byte_tokenizer)
        app = FastAPI()
        ChatWithDocuments().attach_router(app)
        app.state.cachecraft = Endpoint(engine, cache)
        app.state.openai_serving_chat = handler
        app.state.enable_server_load_tracking = False
        with TestClient(app) as client:
            yield client, handler, engine
        engine.close()


@pytest.fixture
def work(count_calls: Callable[..., Counter[str]]) -> Counter[str]:
    """Counts messages, searches, look-ups and plans."""
    return count_calls(
        (Ask, "message"),
        (TokenOffsets, "prompt_text"),
        (ChunkCacheStore, "marked_texts"),
        (ChunkCacheStore, "find"),
        (unmarked, "make_plan"),
    )


@pytest.mark.parametrize("documents", [DOCUMENTS, None])
def test_a_request_that_is_left_to_vllm_is_neither_signed_nor_looked_up_nor_planned(
    made: tuple[TestClient, Handler, ServerEngine],
    work: Counter[str],
    documents: list[dict[str, str]] | None,
) -> None:
    client, handler, engine = made
    text = "\n\n".join(document["text"] for document in DOCUMENTS)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Is it?"}]}
    if documents is None:
        body = {"messages": [{"role": "user", "content": f"{text}\n\nIs it?"}]}
    else:
        body["documents"] = documents

    served = client.post("/v1/chat/completions", json=body)
    assert served.status_code == 400, served.text  # the stand-in for vLLM has no model
    assert sum(work.values()) > 0
    work.clear()
    engine.min_prompt_tokens = 10_000
    left = client.post("/v1/chat/completions", json=body)

    assert "min_prompt_tokens" in left.json()["error"]["message"], left.text
    assert handler.given[-1].keys() <= {"prompt_token_ids"}
    assert handler.sent[-1] == {}
    assert not work


def test_a_prompt_whose_messages_the_chat_template_changes_is_left_to_vllm_and_says_so(
    made: tuple[TestClient, Handler, ServerEngine],
) -> None:
    client, handler, _ = made
    handler.template = SPOILS_USER
    body = {"messages": [{"role": "user", "content": about("kettle")}]}
    for _ in range(2):
        answer = client.post("/v1/chat/completions", json=body)
        note = answer.json()["error"]["message"]
        assert "not searched: messages 0" in note, answer.text
        assert "chat template" in note
        assert handler.sent[-1] == {}


def test_a_prompt_with_an_image_is_left_to_vllm_and_says_so(
    made: tuple[TestClient, Handler, ServerEngine], work: Counter[str]
) -> None:
    client, handler, _ = made
    handler.kind = "multimodal"
    body = {"messages": [{"role": "user", "content": about("kettle")}]}
    for _ in range(
        2
    ):  # the second time, vLLM's prefix cache may have the same tokens of another image
        answer = client.post("/v1/chat/completions", json=body)
        note = answer.json()["error"]["message"]
        assert note == "left to vLLM: it holds images, sound or videos", answer.text
    assert handler.sent[-1] == {}
    assert not work


@pytest.mark.parametrize(
    ("asked", "adapter", "cause"),
    [
        ({"n": 2}, None, "it asks for several answers (n)"),
        (
            {"prompt_logprobs": 1},
            None,
            "it asks for log-probabilities of the prompt, so vLLM computes all of it",
        ),
        ({}, "an adapter", "it uses a LoRA adapter, with which only documents are reused"),
    ],
)
def test_a_prompt_without_documents_that_vllm_has_to_compute_says_why(
    made: tuple[TestClient, Handler, ServerEngine],
    work: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    adapter: str | None,
    cause: str,
) -> None:
    client, handler, engine = made
    monkeypatch.setattr(engine, "predicted_answer", lambda _request: PredictedAnswer())
    handler.asked = asked
    handler.adapter = adapter
    body = {"messages": [{"role": "user", "content": about("kettle")}]}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["message"] == f"left to vLLM: {cause}", answer.text
    assert handler.sent == [{}]
    assert handler.logprobs == [None], "nothing of it is audited"
    assert not work

    short = {"messages": [{"role": "user", "content": "Is it?"}]}
    answer = client.post("/v1/chat/completions", json=short)
    assert not answer.json()["error"]["message"], "too short to be searched, whatever it asks for"


def test_a_request_of_another_connector_keeps_its_parameters(
    made: tuple[TestClient, Handler, ServerEngine],
) -> None:
    client, handler, _ = made
    others = {"do_remote_decode": True}
    handler.asked = {"n": 2, "extra_args": {"kv_transfer_params": others}}
    body = {"messages": [{"role": "user", "content": about("kettle")}]}
    answer = client.post("/v1/chat/completions", json=body)
    assert not answer.json()["error"]["message"], answer.text
    assert handler.sent == [{"kv_transfer_params": others}]


def test_a_request_with_an_adapter_is_not_audited(
    made: tuple[TestClient, Handler, ServerEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An audit would compare the adapter's answer with the base model's."""
    client, handler, engine = made
    monkeypatch.setattr(engine, "predicted_answer", lambda _request: PredictedAnswer())
    body = {"messages": [{"role": "user", "content": "Is it?"}], "documents": DOCUMENTS}
    client.post("/v1/chat/completions", json=body)
    handler.adapter = "an adapter"
    client.post("/v1/chat/completions", json=body)
    assert handler.logprobs == [KEPT, None]
