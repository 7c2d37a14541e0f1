"""vLLM's API server with chunk-caches: chat completions with `documents`, and what goes with them.

A chat request that has the field `documents` becomes a prompt of segments and goes through a copy of vLLM's own
handler; one without it goes to vLLM's own function, untouched.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import prometheus_client
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from vllm.entrypoints.openai.chat_completion import api_router as own
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation
from vllm.entrypoints.serve.utils.sse_keep_alive import with_sse_keep_alive
from vllm.renderers.chat_utils import load_chat_template

from cachecraft_rag.checks import check_flag, check_mapping, check_names, check_text
from cachecraft_rag.errors import CacheCraftError, ConfigError
from cachecraft_rag.types import Chunk
from cachecraft_rag.vllm.documents import Asked, check_documents
from cachecraft_rag.vllm.front import ServerEngine
from cachecraft_rag.vllm.metrics import ServerCollector, told_counts
from cachecraft_rag.vllm.records import Record, RecordingClient, Records
from cachecraft_rag.vllm.serving import Calls
from cachecraft_rag.vllm.settings import ConnectorSettings

T = TypeVar("T")

_THREADS = 4  # for laying out prompts
_LONGEST_SESSION = 256


class ChatWithDocuments:
    """The entry point of `vllm.endpoint_plugins`; see vLLM's `EndpointPlugin`."""

    name = "cachecraft_http"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; that of chat completions takes the place of vLLM's."""
        app.include_router(_router())

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Open the engine over vLLM's, and check that reuse is exact here, before the first request comes."""
        transfer = engine_client.vllm_config.kv_transfer_config
        if transfer is None:
            raise ConfigError("the endpoint needs the connector: start the server with `cachecraft serve`")
        settings = ConnectorSettings.read(transfer.kv_connector_extra_config)
        loop = asyncio.get_running_loop()
        calls = Calls(engine_client, loop)
        template = load_chat_template(args.chat_template)
        opened = partial(ServerEngine.open, settings, engine_client.model_config, chat_template=template, calls=calls)
        engine = await loop.run_in_executor(None, opened)
        await loop.run_in_executor(None, engine.check_reuse)
        state.cachecraft = Endpoint(engine)
        prometheus_client.REGISTRY.register(ServerCollector(engine, told_counts(engine_client)))


class Endpoint:
    """What the routes share: the engine, threads for what blocks, and the records of requests."""

    def __init__(self, engine: ServerEngine) -> None:
        self.engine, self.records = engine, Records(engine.ended)
        self._layouts = ThreadPoolExecutor(_THREADS, "cachecraft-prompts")
        self._slow = ThreadPoolExecutor(2, "cachecraft-priming")

    async def in_thread(self, act: Callable[[], T], *, slow: bool = False) -> T:
        """Do something that blocks; what is wrong with a request becomes a 400 with the reason."""
        threads = self._slow if slow else self._layouts
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, act)
        except CacheCraftError as error:
            raise bad_request(error) from error

    def session(self, raw_request: Request) -> str | None:
        """The session that the trusted header names, if this server trusts one."""
        header = self.engine.settings.session_header
        session = None if header is None else raw_request.headers.get(header)
        if session is not None and not 0 < len(session) <= _LONGEST_SESSION:
            raise bad_request(ConfigError(f"{header} must have 1 to {_LONGEST_SESSION} characters"))
        return session


def bad_request(error: CacheCraftError) -> HTTPException:
    """A 400 in vLLM's own form."""
    return HTTPException(status_code=400, detail=str(error))


async def _documents_are_well_formed(raw_request: Request) -> None:
    """Before vLLM's own validation, whose messages do not say what to do."""
    if b'"documents"' not in await raw_request.body():
        return
    body = await raw_request.json()
    if isinstance(body, dict) and body.get("documents") is not None:
        try:
            check_documents(body["documents"])
        except ConfigError as error:
            raise bad_request(error) from error


async def create_chat_completion(request: ChatCompletionRequest, raw_request: Request) -> Any:
    """Chat completions; with `documents` from chunk-caches."""
    if request.documents is None:
        return await own.create_chat_completion(request, raw_request)
    return await _with_documents(request, raw_request)


@with_cancellation  # type: ignore[untyped-decorator]
@load_aware_call  # type: ignore[untyped-decorator]
async def _with_documents(request: ChatCompletionRequest, raw_request: Request) -> Any:
    endpoint = _endpoint(raw_request)
    engine, session = endpoint.engine, endpoint.session(raw_request)

    def prepare() -> tuple[Record, dict[str, Any], str]:
        asked = Asked.read(request, engine.config, context_length=engine.decoder.context_length)
        prepared, ask = engine.prepare(asked, session=session)
        record = Record(prepared, engine.decoder.layout.layers)
        return record, engine.transfer(ask), ask.cache_salt(engine.namespace)

    try:
        record, transfer, salt = await endpoint.in_thread(prepare)
    except HTTPException:
        engine.tally.refuse()
        raise
    request.documents = None
    request.kv_transfer_params, request.cache_salt = transfer, salt
    stock = raw_request.app.state.openai_serving_chat
    handler = copy.copy(stock)
    handler.engine_client = RecordingClient(stock.engine_client, record, endpoint.records)
    try:
        return await _answer(handler, request, raw_request)
    finally:
        if not record.begun:  # vLLM's own handler has refused it
            engine.tally.refuse()


async def _answer(handler: Any, request: ChatCompletionRequest, raw_request: Request) -> Any:
    """What vLLM's route does, with this handler."""
    answer = await handler.create_chat_completion(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    if isinstance(answer, ChatCompletionResponse):
        return JSONResponse(answer.model_dump())
    interval = float(getattr(raw_request.app.state.args, "sse_keep_alive_interval", 0))
    return StreamingResponse(with_sse_keep_alive(answer, interval), media_type="text/event-stream")


async def facts(raw_request: Request) -> dict[str, Any]:
    """The served model and the settings that a client must know."""
    return _endpoint(raw_request).engine.facts()


async def tokenizer(raw_request: Request) -> dict[str, Any]:
    """The model's tokenizer, for clients that have none of its files."""
    endpoint = _endpoint(raw_request)
    return {"files": await endpoint.in_thread(endpoint.engine.tokenizer_files)}


async def statistics(name: str, raw_request: Request) -> dict[str, Any]:
    """What became of a request with documents; its id is the answer's."""
    endpoint = _endpoint(raw_request)
    found = endpoint.records.get(name, session=endpoint.session(raw_request))
    if found is None:
        raise HTTPException(404, f"no request {name} with documents is remembered; the last 1,000 are")
    return found


async def prime(raw_request: Request) -> dict[str, Any]:
    """Capture the chunks of one document, in order; with "estimate": what would be captured, and the disk's space."""
    endpoint = _endpoint(raw_request)
    engine = endpoint.engine
    body = await _body(raw_request, ("documents", "estimate"))

    def act() -> dict[str, Any]:
        check_documents(body.get("documents"))
        check_flag("estimate", body.get("estimate", False))
        chunks = [Chunk(one["text"]) for one in body["documents"]]
        if body.get("estimate"):
            return {"missing": engine.missing(chunks), "disk": asdict(engine.disk_space())}
        return {"captured": engine.prime(chunks)}

    return await endpoint.in_thread(act, slow=True)


async def evict(raw_request: Request) -> Any:
    """Remove the chunk-caches of chunks, by their ids."""
    endpoint = _endpoint(raw_request)
    body = await _body(raw_request, ("chunk_ids",))

    def act() -> Any:
        ids = body.get("chunk_ids")
        if not isinstance(ids, list):
            raise ConfigError('write {"chunk_ids": ["…"]}')
        for one in ids:
            check_text("each of chunk_ids", one)
        return endpoint.engine.evict(tuple(ids))

    return await endpoint.in_thread(act, slow=True)


async def _body(raw_request: Request, names: tuple[str, ...]) -> dict[str, Any]:
    try:
        body = await raw_request.json()
        check_mapping("the body", body)
        check_names(body, names, what="field")
    except (ValueError, RecursionError, CacheCraftError) as error:
        raise HTTPException(400, f"the body must be a JSON object: {error}") from error
    return dict(body)


def _endpoint(raw_request: Request) -> Endpoint:
    found: Endpoint = raw_request.app.state.cachecraft
    return found


def _router() -> APIRouter:
    """The routes; a function and no decorators, which would take the functions' types away."""
    router = APIRouter()
    json = Depends(validate_json_request)
    posts: list[tuple[str, Callable[..., Any], list[Any]]] = [
        ("/v1/chat/completions", create_chat_completion, [json, Depends(_documents_are_well_formed)]),
        ("/v1/cachecraft/prime", prime, [json]),
        ("/v1/cachecraft/evict", evict, [json]),
    ]
    for path, act, dependencies in posts:
        router.add_api_route(path, act, methods=["POST"], dependencies=dependencies)
    gets: list[tuple[str, Callable[..., Any]]] = [
        ("/v1/cachecraft", facts),
        ("/v1/cachecraft/tokenizer", tokenizer),
        ("/v1/cachecraft/requests/{name}", statistics),
    ]
    for path, act in gets:
        router.add_api_route(path, act, methods=["GET"])
    return router
