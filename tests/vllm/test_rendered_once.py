"""Routes of the server over a handler that counts: searching a prompt renders nothing again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from cachecraft_rag.observability.request_counts import RequestCounts
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.server.settings import EndpointSettings
from cachecraft_rag.vllm.server.endpoint import ChatWithDocuments, Endpoint
from cachecraft_rag.vllm.server.message_places import Searched
from cachecraft_rag.vllm.server.unmarked import Origin, PlainPrompts
from tests.vllm.test_message_places import TEMPLATES, about

TURNS = [
    {"role": "system", "content": "Be brief."},
    *(
        {"role": role, "content": about(f"{role}'s thing {turn}")}
        for turn in range(20)
        for role in ("user", "assistant")
    ),
    {"role": "user", "content": "Which is it?"},
]


class Prompts(PlainPrompts):
    """Notes what is searched, and leaves each prompt to vLLM."""

    found: Searched
    ids: Sequence[int]

    def prepare(self, ids: Sequence[int], locate: Callable[[], Searched], origin: Origin) -> None:
        self.ids, self.found = ids, locate()


class Handler:
    """vLLM's handler of chat completions and of responses: renders the prompt and hands it to the engine's client."""

    exclude_tools_when_tool_choice_none = False

    def __init__(self, tokenizer: Any, template: str) -> None:
        self.rendered: list[int] = []
        self.online_renderer = self
        self.response_store: dict[str, object] = {}
        self.engine_client = SimpleNamespace(generate=self._generate)
        self._tokenizer = tokenizer
        self._template = template

    async def _generate(self, *_: object, **__: object) -> AsyncGenerator[SimpleNamespace]:
        yield SimpleNamespace(finished=True)

    def _render(self, messages: Sequence[Mapping[str, object]]) -> dict[str, Any]:
        text = self._tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False
        )
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        self.rendered.append(len(ids))
        return {"type": "token", "prompt": text, "prompt_token_ids": ids}

    async def render_chat(self, request: Any) -> tuple[list[object], list[dict[str, Any]]]:
        return [], [self._render(request.messages)]

    async def _render_resolved_response_inputs(self, request: Any, _: object) -> SimpleNamespace:
        return SimpleNamespace(engine_input=self._render(request.input))

    async def _served(self, prompt: dict[str, Any]) -> ErrorResponse:
        params = SimpleNamespace(n=1, prompt_logprobs=None, extra_args=None)
        async for _ in self.engine_client.generate(prompt, params, "request"):
            pass
        error = ErrorInfo(message="no model", type="of this test", code=400)
        return ErrorResponse(error=error)

    async def create_chat_completion(self, request: Any, _: object) -> ErrorResponse:
        _messages, (prompt,) = await self.render_chat(request)
        return await self._served(prompt)

    async def create_responses(self, request: Any, _: object) -> ErrorResponse:
        result = await self._render_resolved_response_inputs(request, None)
        return await self._served(result.engine_input)


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_a_request_is_rendered_once(byte_tokenizer: Any, family: str, path: str) -> None:
    handler = Handler(byte_tokenizer, TEMPLATES[family])
    engine: Any = SimpleNamespace(
        request_counts=RequestCounts(),
        decoder=SimpleNamespace(name="model", tokenizer=byte_tokenizer),
        config=ReuseConfig(),
        settings=EndpointSettings(root="unused", model="model", plain_prompts="off"),
        ended=lambda _: None,
        tenant="",
        calibrated=lambda config: config,
        chosen_ratio=lambda config: None,
    )
    endpoint = Endpoint(engine, SimpleNamespace())
    prompts = endpoint.plain_prompts = Prompts(engine, endpoint.records, cached_tokens=0)
    app = FastAPI()
    ChatWithDocuments().attach_router(app)
    app.state.cachecraft = endpoint
    app.state.openai_serving_chat = app.state.openai_serving_responses = handler
    app.state.enable_server_load_tracking = False

    body = {"messages": TURNS} if path == "chat/completions" else {"input": TURNS}
    answer = TestClient(app).post(f"/v1/{path}", json=body)

    assert answer.json()["error"]["message"] == "no model", answer.text
    assert len(handler.rendered) == 1
    texts = [
        byte_tokenizer.decode(prompts.ids[part.start : part.stop]) for part in prompts.found.texts
    ]
    assert texts == [turn["content"] for turn in TURNS if turn["role"] == "user"]
