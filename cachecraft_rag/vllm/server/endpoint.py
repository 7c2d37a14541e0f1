"""vLLM's API server with chunk-caches: chat completions with `documents`, and further routes.

A chat request with the field `documents` becomes a prompt of segments and is served by a copy of vLLM's own handler. A
request without it is served by vLLM's own function, or searched (`unmarked`) if this server reuses plain prompts.
Chunk-caches and statistics are those of the tenant and the session that the request's headers name.

With vLLM's `--api-key`, all these routes need that key, else 401. `prime`, `evict` and `readmit` also need one of
`EndpointSettings.admin_keys`, else 403; with None there they do not, with () they are closed.
"""

from __future__ import annotations

import asyncio
import copy
import json
from argparse import Namespace
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    MutableMapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import prometheus_client
import vllm.envs
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion import api_router as chats
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.completion import api_router as completions
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.responses import api_router as responses
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from vllm.entrypoints.serve.utils.orca_metrics import metrics_header
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.renderers.chat_utils import load_chat_template

from cachecraft_rag.errors import CacheCraftError, ConfigError
from cachecraft_rag.server import administration, holding
from cachecraft_rag.server.documents import (
    Asked,
    check_documents,
    plain_config,
    uncaptured_note,
    whole_body,
)
from cachecraft_rag.server.ready import announce
from cachecraft_rag.server.response_input import messages_of
from cachecraft_rag.server.wire import (
    ADMIN_HEADER,
    CHAT,
    EVICT,
    FACTS,
    HOLDS,
    PRIME,
    READMIT,
    REQUESTS,
    TOKENIZER,
    Message,
)
from cachecraft_rag.vllm.beside import check_beside, connectors_in
from cachecraft_rag.vllm.calls import Calls
from cachecraft_rag.vllm.messages import salt_of
from cachecraft_rag.vllm.metrics import ServerCollector, reported_counts
from cachecraft_rag.vllm.options import CacheConfig
from cachecraft_rag.vllm.records import RecordingClient, Records, RequestRecord
from cachecraft_rag.vllm.server.message_places import Searched
from cachecraft_rag.vllm.server.server_engine import ServerEngine
from cachecraft_rag.vllm.server.unmarked import (
    Locate,
    Origin,
    PlainPrompts,
    SearchingClient,
)
from cachecraft_rag.vllm.settings import ConnectorSettings, check_tenants

T = TypeVar("T")

_THREADS = 4  # for laying out prompts
# paths of POST that keep tenants apart, or leave nothing in a cache
_DIVIDED = frozenset(
    {
        CHAT,
        "/v1/completions",
        "/v1/responses",
        PRIME,
        EVICT,
        READMIT,
        HOLDS,
        "/tokenize",
        "/detokenize",
    }
)


class DocumentChatRequest(ChatCompletionRequest):
    """vLLM's chat request; documents may have metadata of any form, which is ignored."""

    documents: list[dict[str, Any]] | None = None


class ChatWithDocuments:
    """The entry point of `vllm.endpoint_plugins`; see vLLM's `EndpointPlugin`."""

    name = "cachecraft_http"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add `OtherRoutes` and our routes; those of completions, chat completions and responses replace vLLM's.

        vLLM calls this once, after it has added its own routes, and then removes those with the same path and method.
        """
        app.include_router(_router())
        app.add_middleware(OtherRoutes)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Open the engine over vLLM's, check that reuse is exact here, and set `state.cachecraft` to an `Endpoint`.

        Metrics of the engine are registered with this process's `prometheus_client.REGISTRY`, and a task logs when the
        server accepts requests. vLLM calls this before that, with its `AsyncLLM`, the app's `state` and its parsed
        arguments; an error ends the server, such as those of `ServerEngine.open` and `check_reuse`. The engine stays
        open until the process ends.
        """
        settings = ConnectorSettings.of(engine_client.vllm_config)
        _check_server(engine_client, args, settings)
        loop = asyncio.get_running_loop()
        calls = Calls(engine_client, loop)
        template = load_chat_template(args.chat_template)
        opened = partial(
            ServerEngine.open,
            settings,
            engine_client.model_config,
            chat_template=template,
            calls=calls,
        )
        engine = await loop.run_in_executor(None, opened)
        state.cachecraft = Endpoint(engine, engine_client.vllm_config.cache_config)
        reported = reported_counts(engine_client, state.cachecraft.records.take)
        await loop.run_in_executor(None, engine.check_reuse)
        prometheus_client.REGISTRY.register(ServerCollector(engine, reported))
        needs_key = bool(vllm.envs.VLLM_API_KEY)
        # kept here, because the loop holds tasks weakly
        state.cachecraft.announcement = loop.create_task(
            announce(args, settings.endpoint, needs_key=needs_key, note=engine.layer_by_layer)
        )


def _check_server(engine_client: Any, args: Namespace, settings: ConnectorSettings) -> None:
    """Raise ConfigError if `vllm serve` started the server with options that `cachecraft serve` sets or refuses."""
    if engine_client.vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError('write "kv_load_failure_policy": "recompute" into --kv-transfer-config')
    if engine_client.logger_manager is None:
        raise ConfigError(
            "statistics of requests are sent with vLLM's: leave out --disable-log-stats"
        )
    if (getattr(args, "api_server_count", None) or 1) > 1:
        raise ConfigError(
            "statistics of requests are kept in one API server: leave out --api-server-count"
        )
    check_tenants(
        settings.endpoint, stores_responses=bool(vllm.envs.VLLM_ENABLE_RESPONSES_API_STORE)
    )
    beside = connectors_in(engine_client.vllm_config.kv_transfer_config)[1:]
    check_beside(beside, settings.config.reuse, settings.endpoint.client_settings)


class OtherRoutes:
    """Middleware that closes vLLM's other routes of POST and its websockets if the server has tenants to separate.

    Without tenants, a `cache_salt` in a body is digested as in the routes of this package.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it (403)."""
        endpoint: Endpoint | None = getattr(scope["app"].state, "cachecraft", None)
        is_post = scope.get("method") == "POST"
        is_other = scope["type"] == "websocket" or (is_post and _path_of(scope) not in _DIVIDED)
        if endpoint is None or not is_other:
            await self._app(scope, receive, send)
            return
        header = endpoint.engine.settings.tenant_header
        if header is None:
            with suppress(ClientDisconnect):  # the client reads no reply
                if is_post:
                    scope, receive = await _with_digested_salt(scope, receive)
                await self._app(scope, receive, send)
            return
        message = (
            f"{scope['path']} does not keep tenants apart ({header}): send requests to "
            "/v1/chat/completions, and name LoRA adapters when the server starts (--lora-modules)"
        )
        refusal = JSONResponse({"error": {"message": message, "code": 403}}, status_code=403)
        await refusal(scope, receive, send)


def _path_of(scope: Scope) -> str:
    """Return the path of a request as routes have it: without --root-path, which a proxy may leave in or cut off."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


async def _with_digested_salt(scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
    """Return the request with a digest in place of the `cache_salt` in its body, see `salt_of`.

    Raises ClientDisconnect if the client leaves before its whole body has arrived.
    """
    body = await Request(scope, receive).body()
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # an upload, or a body that its route refuses
        fields = None
    salt = fields.get("cache_salt") if isinstance(fields, dict) else None
    if isinstance(salt, str) and salt:
        body = json.dumps({**fields, "cache_salt": salt_of(None, salt)}).encode()
        scope = {**scope, "headers": list(scope["headers"])}
        MutableHeaders(scope=scope)["content-length"] = str(len(body))
    is_read = False

    async def receive_again() -> MutableMapping[str, Any]:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return scope, receive_again


class Endpoint:
    """State of the routes: the engine, threads for blocking calls, and the records of requests."""

    def __init__(self, engine: ServerEngine, cache_config: CacheConfig) -> None:
        self.engine = engine
        self.records = Records(engine.ended, model=engine.decoder.name)
        self.announcement: asyncio.Task[None] | None = None  # of the end of the start
        self.plain_prompts: PlainPrompts | None = None
        if engine.settings.plain_prompts == "reuse":
            blocks = cache_config.num_gpu_blocks or 0 if cache_config.enable_prefix_caching else 0
            cached_tokens = blocks * cache_config.block_size
            self.plain_prompts = PlainPrompts(engine, self.records, cached_tokens=cached_tokens)
        self._layouts = ThreadPoolExecutor(_THREADS, "cachecraft-prompts")
        self._slow = ThreadPoolExecutor(2, "cachecraft-priming")

    async def in_thread(self, act: Callable[[], T], *, slow: bool = False) -> T:
        """Return the result of a blocking function; `slow` work, of minutes, has two threads, other work four.

        Any CacheCraftError becomes an HTTPException (400, with the reason). If the caller is cancelled, an `act` that
        has begun goes on in its thread.
        """
        threads = self._slow if slow else self._layouts
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, act)
        except CacheCraftError as error:
            raise bad_request(error) from error

    def session(self, raw_request: Request) -> str | None:
        """Return the session in a request's `session_header`, or None. HTTPException (400) for a wrong header."""
        try:
            return self.engine.settings.session_in(raw_request.headers)
        except ConfigError as error:
            raise bad_request(error) from error

    def engine_for(self, raw_request: Request) -> ServerEngine:
        """Return the engine of the tenant that a request's header names; the server's own if it has no tenants.

        Raises HTTPException (400) for a missing or invalid name, see `EndpointSettings.tenant_in`.
        """
        try:
            tenant = self.engine.settings.tenant_in(raw_request.headers)
        except ConfigError as error:
            raise bad_request(error) from error
        return self.engine.for_tenant(tenant) if tenant else self.engine


def bad_request(error: CacheCraftError) -> HTTPException:
    """Return an HTTPException (400) with the error's message, in which `max_new_tokens` becomes `max_tokens`."""
    return HTTPException(status_code=400, detail=str(error).replace("max_new_tokens", "max_tokens"))


async def _documents_are_well_formed(raw_request: Request) -> None:
    """Check documents before vLLM's own validation, whose messages do not say what to do."""
    if b'"documents"' not in await raw_request.body():
        return
    body = await raw_request.json()
    if isinstance(body, dict) and body.get("documents") is not None:
        try:
            check_documents(body["documents"])
        except ConfigError as error:
            raise bad_request(error) from error


async def create_chat_completion(request: DocumentChatRequest, raw_request: Request) -> Response:
    """Serve a chat completion; one with the field `documents`, even an empty list, as a prompt of segments.

    A request without `documents` is passed to vLLM. If this server reuses plain prompts, its messages are searched on
    the way. Returns JSON, or a stream of server-sent events if the request asks for one; None if the client has gone.
    Refusals of vLLM's own handler are JSON with the status that it chose; ours are an HTTPException (400). With
    `documents` both are counted, but not a refused header or malformed documents.
    """
    if request.documents is not None:
        return await _with_documents(request, raw_request)
    origin = _origin(request, raw_request)
    _divide_prefix_cache(request, raw_request)
    if origin is None:
        return await chats.create_chat_completion(request, raw_request)
    return await _plain_chat(request, raw_request, origin)


@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def _with_documents(request: DocumentChatRequest, raw_request: Request) -> Response:
    endpoint = _endpoint(raw_request)
    engine = endpoint.engine_for(raw_request)
    session = endpoint.session(raw_request)
    stock = raw_request.app.state.openai_serving_chat

    def prepare() -> tuple[RequestRecord, dict[str, object]]:
        asked = Asked.read(
            request,
            engine.config,
            context_length=engine.decoder.context_length,
            allowed=endpoint.engine.settings.client_settings,
        )
        if request.tool_choice == "none" and stock.exclude_tools_when_tool_choice_none:
            asked = replace(asked, tools=())
        prepared, ask = engine.prepare(asked, session=session)
        reason = ask.left_to_server
        record = RequestRecord(
            prepared,
            engine.decoder.layout.layers,
            ask.name,
            remark=uncaptured_note(asked.config, engine.config),
            predicted=engine.predicted_answer(prepared),
        )
        if reason:  # vLLM computes all of it, and needs no message
            record.leave(reason)
            return record, {"prompt_token_ids": prepared.prompt.token_ids}
        return record, engine.transfer(ask)

    try:
        record, transfer = await endpoint.in_thread(prepare)
    except HTTPException:
        engine.request_counts.refuse()
        raise
    request.documents = None
    request.kv_transfer_params = transfer
    # blocks without chunks are shared with requests without documents, see `worker.block_hashes`
    _divide_prefix_cache(request, raw_request)
    handler = copy.copy(stock)
    handler.engine_client = RecordingClient(stock.engine_client, record, endpoint.records)
    handler.enable_prompt_tokens_details = True
    try:
        return await _answer(handler.create_chat_completion, request, raw_request)
    finally:
        if not record.begun:  # vLLM's own handler has refused it
            engine.request_counts.refuse()


@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def _plain_chat(
    request: ChatCompletionRequest, raw_request: Request, origin: Origin
) -> Response:
    request.return_token_offsets = True  # for `locate`; no client sees them
    stock = raw_request.app.state.openai_serving_chat
    handler = _searching(stock, raw_request, origin, _locate(raw_request, request.messages))
    return await _answer(handler.create_chat_completion, request, raw_request)


async def create_completion(request: CompletionRequest, raw_request: Request) -> Response:
    """Serve a completion by vLLM's own handler: return JSON, or a stream of server-sent events if asked for one.

    The prompt is searched on the way if this server reuses plain prompts; otherwise, and with beam search, reuse
    settings are ignored. HTTPException (400) for a request with `documents`, which only chat completions take. None if
    the client has gone.
    """
    _require_none(request)
    origin = _origin(request, raw_request)
    _divide_prefix_cache(request, raw_request)
    if origin is None:
        return await completions.create_completion(request, raw_request)
    return await _plain_completion(request, raw_request, origin)


@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def _plain_completion(
    request: CompletionRequest, raw_request: Request, origin: Origin
) -> Response:
    def locate(prompt: Mapping[str, Any]) -> Searched:
        return Searched((range(len(prompt["prompt_token_ids"])),), ("prompt",))

    handler = _searching(
        raw_request.app.state.openai_serving_completion, raw_request, origin, locate
    )
    return await _answer(handler.create_completion, request, raw_request)


def _divide_prefix_cache(
    request: ChatCompletionRequest | CompletionRequest | ResponsesRequest, raw_request: Request
) -> None:
    """Keep blocks of a tenant and a session in vLLM's prefix cache apart from others, by the request's salt."""
    endpoint = _endpoint(raw_request)
    tenant = endpoint.engine_for(raw_request).tenant
    salt = salt_of(endpoint.session(raw_request), request.cache_salt or "", tenant=tenant)
    request.cache_salt = salt or None


def _origin(
    request: ChatCompletionRequest | CompletionRequest | ResponsesRequest, raw_request: Request
) -> Origin | None:
    """Return the origin of a request without documents; None if vLLM serves it without reuse."""
    endpoint = _endpoint(raw_request)
    engine = endpoint.engine
    has_beams = getattr(request, "use_beam_search", False)
    if endpoint.plain_prompts is None or has_beams:
        return None
    session = endpoint.session(raw_request)
    try:
        config = plain_config(request, engine.config, engine.settings.client_settings)
    except ConfigError as error:
        raise bad_request(error) from error
    if config is None:
        return None
    calibrated = engine.calibrated(config)
    quality = ""
    if (chosen := engine.chosen_ratio(config)) is not None:
        ratio, quality = chosen
        calibrated = replace(calibrated, recompute_ratio=ratio)
    tenant = endpoint.engine_for(raw_request).tenant
    return Origin(session, request.cache_salt or "", calibrated, quality, tenant)


def _locate(raw_request: Request, messages: Sequence[Message]) -> Locate:
    """Return the function that finds the messages to search in a rendered prompt."""
    endpoint = _endpoint(raw_request)
    assert endpoint.plain_prompts is not None, "otherwise the request has no origin"
    return partial(
        endpoint.plain_prompts.locate,
        messages=messages,
        search_system=endpoint.engine.settings.search_system,
    )


def _searching(stock: Any, raw_request: Request, origin: Origin, locate: Locate) -> Any:
    """Return a copy of vLLM's own handler whose prompts are searched."""
    prompts = _endpoint(raw_request).plain_prompts
    assert prompts is not None, "otherwise the request has no origin"
    handler = copy.copy(stock)
    handler.engine_client = SearchingClient(stock.engine_client, prompts, origin, locate)
    handler.enable_prompt_tokens_details = True
    return handler


async def create_responses(request: ResponsesRequest, raw_request: Request) -> Response:
    """Serve a response by vLLM's own handler, with replies as in `create_completion`: JSON, or a stream of events.

    The messages of its input are searched if this server reuses plain prompts; `documents` are refused (400).
    """
    _require_none(request)
    origin = _origin(request, raw_request)
    _divide_prefix_cache(request, raw_request)
    if origin is None:
        return await responses.create_responses(request, raw_request)
    return await _plain_responses(request, raw_request, origin)


@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def _plain_responses(
    request: ResponsesRequest, raw_request: Request, origin: Origin
) -> Response:
    locate = _locate(raw_request, messages_of(request))
    stock = raw_request.app.state.openai_serving_responses
    handler = _searching(stock, raw_request, origin, locate)
    answer = await handler.create_responses(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(mode="json"), status_code=answer.error.code)
    if isinstance(answer, ResponsesResponse):
        return JSONResponse(answer.model_dump(mode="json", by_alias=True))
    return StreamingResponse(_events(answer), media_type="text/event-stream")


async def _events(answer: AsyncIterator[Any]) -> AsyncGenerator[str]:
    """Yield the events of a streamed response as server-sent events."""
    async for event in answer:
        yield f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"


def _require_none(request: CompletionRequest | ResponsesRequest) -> None:
    if (request.model_extra or {}).get("documents") is not None:
        raise bad_request(
            ConfigError(
                "documents are taken by /v1/chat/completions: send the question there, or, to a server with "
                "--reuse-plain-prompts, write their texts into the prompt"
            )
        )


async def _answer(
    act: Callable[[object, Request], Awaitable[object]], request: object, raw_request: Request
) -> Response:
    """Answer as vLLM's route does, with the handler's method `act`."""
    answer = await act(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if isinstance(answer, ChatCompletionResponse | CompletionResponse):
        load = metrics_header(
            raw_request.headers.get(chats.ENDPOINT_LOAD_METRICS_FORMAT_HEADER_LABEL, "")
        )
        return JSONResponse(answer.model_dump(), headers=load)
    interval = float(getattr(raw_request.app.state.args, "sse_keep_alive_interval", 0))
    return StreamingResponse(with_sse_keep_alive(answer, interval), media_type="text/event-stream")


async def facts(raw_request: Request) -> dict[str, object]:
    """Return facts that a client needs, the same for all tenants, as JSON values by name: `ServerEngine.facts`."""
    return _endpoint(raw_request).engine.facts()


async def tokenizer(raw_request: Request) -> dict[str, object]:
    """Return the files of the model's tokenizer, see `facts.tokenizer_files`: {"files": {name: text}}."""
    endpoint = _endpoint(raw_request)
    return {"files": await endpoint.in_thread(endpoint.engine.tokenizer_files)}


async def statistics(name: str, raw_request: Request) -> dict[str, object]:
    """Return statistics of a request by the id of its answer, see `Records.of_answer`, and its audit as "audit".

    Requests with `documents` are recorded, and others in whose prompt a passage was found, or that have a note why it
    was not searched. "audit" has the values of `Audit`, or None for an answer that was not audited, or not yet.

    Raises HTTPException (404) for an unknown answer, one not among the last 1,000, or of another tenant or session.
    """
    endpoint = _endpoint(raw_request)
    engine = endpoint.engine_for(raw_request)
    owner = (engine.namespace, endpoint.session(raw_request))
    numbers = endpoint.records.of_answer(name, owner=owner)
    if numbers is None:
        raise HTTPException(
            404, f"no request {name} with documents is remembered; the last 1,000 are"
        )
    audit = engine.audit_of(str(numbers["id"]))
    return numbers | {"audit": None if audit is None else audit.as_dict()}


async def prime(raw_request: Request) -> dict[str, object]:
    """Prime the document in the body's "documents", see `administration.prime`; return {"captured": number stored}.

    With "estimate" nothing is captured: returns "missing", variant id → tokens, and "disk". Raises HTTPException (400)
    for an invalid or too large body, a chunk that does not fit a pass, and a private instruction.
    """
    return await _changed(raw_request, administration.prime)


async def evict(raw_request: Request) -> dict[str, object]:
    """Evict the tenant's chunks in "chunk_ids", see `administration.evict`; return number of "variants" and "nbytes".

    With "removed" they leave until `readmit`. Those of all sessions leave, but captures that vLLM's processes have
    begun are stored later, unless their chunks are removed. HTTPException (400) for an invalid body.
    """
    return await _changed(raw_request, administration.evict)


async def readmit(raw_request: Request) -> dict[str, object]:
    """Readmit the tenant's chunks in "chunk_ids"; return {"removed": ids of its chunks that stay removed, sorted}."""
    return await _changed(raw_request, administration.readmit)


async def holds(raw_request: Request) -> dict[str, object]:
    """Return what this server's store holds of the body's "chunk_ids" or "documents", see `holding.holds`.

    The reply has "chunks", one entry for each in order, and "tokens", their sum. Needs no admin key.
    """
    endpoint = _endpoint(raw_request)
    session = endpoint.session(raw_request)
    body = await _body(raw_request)
    return await endpoint.in_thread(
        partial(holding.holds, endpoint.engine_for(raw_request), body, session=session)
    )


async def _changed(
    raw_request: Request, change: Callable[[ServerEngine, bytes], dict[str, object]]
) -> dict[str, object]:
    """Return the reply of a request that changes shared chunk-caches."""
    endpoint = _endpoint(raw_request)
    given = raw_request.headers.get(ADMIN_HEADER, "")
    if refusal := administration.refusal_of(given, endpoint.engine.settings.admin_keys):
        raise HTTPException(403, refusal)
    engine = endpoint.engine_for(raw_request)
    body = await _body(raw_request)
    return await endpoint.in_thread(partial(change, engine, body), slow=True)


async def _body(raw_request: Request) -> bytes:
    """Return the body unparsed: large bodies are parsed outside the event loop."""
    try:
        return await whole_body(raw_request.stream())
    except ConfigError as error:
        raise bad_request(error) from error


def _endpoint(raw_request: Request) -> Endpoint:
    endpoint: Endpoint = raw_request.app.state.cachecraft
    return endpoint


def _router() -> APIRouter:
    """Return the routes, added without decorators, which would hide the functions' types."""
    router = APIRouter()
    is_json = Depends(validate_json_request)
    posts: list[tuple[str, Callable[..., Awaitable[object]], list[object]]] = [
        (
            CHAT,
            create_chat_completion,
            [is_json, Depends(_documents_are_well_formed)],
        ),
        ("/v1/completions", create_completion, [is_json]),
        ("/v1/responses", create_responses, [is_json]),
        (PRIME, prime, [is_json]),
        (EVICT, evict, [is_json]),
        (READMIT, readmit, [is_json]),
        (HOLDS, holds, [is_json]),
    ]
    for path, act, dependencies in posts:
        router.add_api_route(path, act, methods=["POST"], dependencies=dependencies)
    gets: list[tuple[str, Callable[..., Awaitable[object]]]] = [
        (FACTS, facts),
        (TOKENIZER, tokenizer),
        (f"{REQUESTS}/{{name}}", statistics),
    ]
    for path, act in gets:
        router.add_api_route(path, act, methods=["GET"])
    return router
