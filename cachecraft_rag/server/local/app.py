"""The routes of the server over an engine in this process, as a Starlette application."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import prometheus_client
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cachecraft_rag.checks import shown
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.observability.metrics import EngineCollector
from cachecraft_rag.server import administration
from cachecraft_rag.server.documents import read_body, whole_body
from cachecraft_rag.server.facts import facts_of, tokenizer_files
from cachecraft_rag.server.holding import holds
from cachecraft_rag.server.local.answers import Answer, Answerer, Caller
from cachecraft_rag.server.local.embeddings import Embeddings
from cachecraft_rag.server.local.fields import Body, includes_usage
from cachecraft_rag.server.local.refusals import Refused, refused
from cachecraft_rag.server.local.replies import (
    chat_events,
    chat_reply,
    completion_events,
    completion_reply,
    event,
)
from cachecraft_rag.server.local.response_events import response_events, response_reply
from cachecraft_rag.server.remembered import Remembered
from cachecraft_rag.server.settings import EndpointSettings
from cachecraft_rag.server.wire import (
    ADMIN_HEADER,
    CHAT,
    EVICT,
    FACTS,
    HOLDS,
    MOST_REMEMBERED,
    PRIME,
    READMIT,
    REQUESTS,
    TOKENIZER,
)
from cachecraft_rag.serving.sampling import SamplingParams

T = TypeVar("T")
Act = Callable[[Request], Awaitable[Response]]
logger = logging.getLogger("cachecraft_rag.server")

_PARSED_AT_ONCE = 1 << 18  # bytes, which take a millisecond; larger bodies are parsed in a thread
_LAYOUT_THREADS = 4
_EMBEDDING_THREADS = 4  # apart from those for prompts: embedding many texts takes long
_SLOW_THREADS = 2  # for priming and eviction, which may take minutes
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_GONE = "the client closed the connection"


class LocalServer:
    """Routes over one engine; they run in the server's event loop.

    Args:
        engine: the engine; the caller closes it, once the server has ended.
        settings: `root` is not read; `model` is the name that clients use.
        system: the engine's instruction.
        best_last: put the best document last, before the question.
        defaults: sampling parameters for what a request leaves open; None: `SamplingParams()`.
        embeddings: answers `/v1/embeddings`.
        folder: the model's folder, whose tokenizer clients may fetch; None: they cannot.
        api_keys: keys of which requests to /v1 need one (not /health and /metrics); (): no key.
        only_local_names: refuse requests that name another host than this computer (DNS rebinding).
        ready: called once the server accepts requests.
    """

    def __init__(
        self,
        engine: Engine,
        settings: EndpointSettings,
        *,
        system: str,
        best_last: bool = True,
        defaults: SamplingParams | None = None,
        embeddings: Embeddings,
        folder: Path | None = None,
        api_keys: Sequence[str] = (),
        only_local_names: bool = False,
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._system = system
        self._embeddings = embeddings
        self._folder = folder
        self._api_keys = tuple(api_keys)
        self._only_local_names = only_local_names
        self._ready = ready
        self._remembered = Remembered()
        self._answerer = Answerer(
            engine,
            settings,
            system=system,
            best_last=best_last,
            defaults=defaults or SamplingParams(),
            ended=self._keep,
        )
        self._layouts = ThreadPoolExecutor(_LAYOUT_THREADS, "cachecraft-prompts")
        self._embedding = ThreadPoolExecutor(_EMBEDDING_THREADS, "cachecraft-embeddings")
        self._slow = ThreadPoolExecutor(_SLOW_THREADS, "cachecraft-priming")
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(EngineCollector(engine))

    def app(self) -> Starlette:
        """Return the application, which runs once: the threads of its routes end with it."""
        posts: Mapping[str, Act] = {
            CHAT: self._chat,
            "/v1/completions": self._completion,
            "/v1/responses": self._response,
            "/v1/embeddings": self._embed,
            PRIME: partial(self._change, administration.prime),
            EVICT: partial(self._change, administration.evict),
            READMIT: partial(self._change, administration.readmit),
            HOLDS: self._holds,
        }
        gets: Mapping[str, Act] = {
            "/health": self._health,
            "/metrics": self._metrics,
            "/v1/models": self._models,
            "/v1/models/{name:path}": self._model,
            FACTS: self._facts,
            TOKENIZER: self._tokenizer,
            f"{REQUESTS}/{{name}}": self._statistics,
        }
        return Starlette(
            routes=[
                *(Route(path, _refusing(act), methods=["POST"]) for path, act in posts.items()),
                *(Route(path, _refusing(act), methods=["GET"]) for path, act in gets.items()),
            ],
            middleware=[
                Middleware(Guard, api_keys=self._api_keys, only_local_names=self._only_local_names)
            ],
            exception_handlers={HTTPException: _routing_error},
            lifespan=self._life,
        )

    @asynccontextmanager
    async def _life(self, _app: Starlette) -> AsyncIterator[None]:
        self._ready()
        try:
            yield
        finally:
            for threads in (self._layouts, self._embedding, self._slow):
                threads.shutdown(wait=False, cancel_futures=True)

    # -- answers ------------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        answer = await self._begun(request, partial(self._answerer.chat, body))
        model = self._settings.model
        with_tokens = bool(body.get("return_token_ids"))
        if not body.get("stream"):
            reply = chat_reply(answer, model, with_tokens=with_tokens)
            return await self._whole(request, reply)
        with_usage = includes_usage(body)
        events = chat_events(answer, model, with_usage=with_usage, with_tokens=with_tokens)
        return EventStream(answer, events)

    async def _completion(self, request: Request) -> Response:
        body = await self._body(request)
        answer = await self._begun(request, partial(self._answerer.completion, body))
        model = self._settings.model
        if not body.get("stream"):
            return await self._whole(request, completion_reply(answer, model))
        events = completion_events(answer, model, with_usage=includes_usage(body))
        return EventStream(answer, events)

    async def _response(self, request: Request) -> Response:
        body = await self._body(request)
        answer = await self._begun(request, partial(self._answerer.response, body))
        model = self._settings.model
        if not body.get("stream"):
            return await self._whole(request, response_reply(answer, model, body))
        return EventStream(answer, response_events(answer, model, body))

    def _caller(self, request: Request) -> Caller:
        settings = self._settings
        tenant = settings.tenant_in(request.headers)
        engine = self._engine.for_tenant(tenant) if tenant else self._engine
        return Caller(engine, settings.session_in(request.headers))

    async def _begun(self, request: Request, ask: Callable[[Caller], Answer]) -> Answer:
        """Lay out a prompt and wait for the first piece of its answer, unless the client goes away."""
        caller = self._caller(request)
        answer = await self._in_thread(partial(ask, caller))
        await _unless_gone(request, answer.begin())
        return answer

    async def _whole(self, request: Request, reply: Awaitable[dict[str, object]]) -> Response:
        return Reply(await _unless_gone(request, reply))

    def _keep(self, answer: Answer) -> None:
        self._remembered.keep(answer.name, answer.owner, answer.statistics())

    async def _embed(self, request: Request) -> Response:
        body = await self._body(request, model=self._embeddings.model)
        embed = partial(self._embeddings.reply, body)
        return Reply(await self._in_thread(embed, self._embedding))

    # -- facts --------------------------------------------------------------------------------------------------------

    async def _health(self, _request: Request) -> Response:
        return Reply({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        text = await self._in_thread(partial(encode, self._registry))
        return Response(text, media_type=None, headers={"Content-Type": kind})

    def _model_entries(self) -> list[dict[str, object]]:
        context = self._engine.decoder.context_length
        entry = {"object": "model", "created": 0, "owned_by": "cachecraft"}
        entries: list[dict[str, object]] = [
            {"id": self._settings.model, **entry, "max_model_len": context}
        ]
        if self._embeddings.available:
            entries.append({"id": self._embeddings.model, **entry})
        return entries

    async def _models(self, _request: Request) -> Response:
        return Reply({"object": "list", "data": self._model_entries()})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        entries = {str(entry["id"]): entry for entry in self._model_entries()}
        if name not in entries:
            raise _unknown_model(name, list(entries))
        return Reply(entries[name])

    async def _facts(self, _request: Request) -> Response:
        end_tokens = self._engine.decoder.end_tokens
        facts = facts_of(self._engine, self._settings, system=self._system, end_tokens=end_tokens)
        return Reply(facts | {"model": self._settings.model})

    async def _tokenizer(self, _request: Request) -> Response:
        folder = self._folder
        if folder is None:
            raise Refused(404, "the files of this model's tokenizer are not on this machine")
        tokenizer = self._engine.decoder.tokenizer
        files = await self._in_thread(partial(tokenizer_files, folder, tokenizer))
        return Reply({"files": files})

    async def _statistics(self, request: Request) -> Response:
        name = request.path_params["name"]
        caller = self._caller(request)
        numbers = self._remembered.get(name, owner=caller.owner)
        if numbers is None:
            raise Refused(
                404, f"no answer {name} is remembered; the last {MOST_REMEMBERED:,} that ended are"
            )
        audit = caller.engine.audit_of(name.partition("-")[2] or name.removeprefix("resp_"))
        audited = None if audit is None else audit.as_dict()
        return Reply({"id": name} | numbers | {"audit": audited})

    async def _holds(self, request: Request) -> Response:
        caller = self._caller(request)
        body = await _bytes(request)
        asked = partial(holds, caller.engine, body, session=caller.session)
        return Reply(await self._in_thread(asked))

    async def _change(
        self, change: Callable[[Engine, bytes], dict[str, object]], request: Request
    ) -> Response:
        """Reply to a request that changes shared chunk-caches."""
        given = request.headers.get(ADMIN_HEADER, "")
        if refusal := administration.refusal_of(given, self._settings.admin_keys):
            raise Refused(403, refusal, type="permission_error")
        engine = self._caller(request).engine
        body = await _bytes(request)
        return Reply(await self._in_thread(partial(change, engine, body), self._slow))

    # -- helpers ------------------------------------------------------------------------------------------------------

    async def _body(self, request: Request, *, model: str | None = None) -> Body:
        """Return the JSON object of a request for `model` (None: the served one). Raises Refused for another model."""
        content = await _bytes(request)
        if len(content) > _PARSED_AT_ONCE:
            parsed = await self._in_thread(partial(read_body, content))
        else:  # sooner than a thread begins
            parsed = read_body(content)
        name = parsed.get("model")
        served = self._settings.model if model is None else model
        if name not in (None, served):
            raise _unknown_model(name, [served])
        return parsed

    async def _in_thread(
        self, act: Callable[[], T], threads: ThreadPoolExecutor | None = None
    ) -> T:
        """Return the result of a blocking function, run in one of `threads`; None: those for prompts."""
        return await asyncio.get_running_loop().run_in_executor(threads or self._layouts, act)


class Reply(JSONResponse):
    """A JSON reply. Half a surrogate pair is written as an escape, as in the request that brought it."""

    def render(self, content: object) -> bytes:
        """Return the content as JSON in UTF-8. Raises ValueError for NaN and infinities."""
        return _encoded(json.dumps(content, ensure_ascii=False, allow_nan=False))


def _encoded(text: str) -> bytes:
    """Return JSON text as UTF-8; half a surrogate pair becomes an escape such as `\\ud83e`."""
    return text.encode("utf-8", "backslashreplace")


class EventStream(StreamingResponse):
    """An answer as server-sent events; an error within it is its last event. The answer ends with it."""

    def __init__(self, answer: Answer, events: AsyncIterator[str]) -> None:
        super().__init__(
            _with_error(events),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; if the client goes away, the answer is given up."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


async def _with_error(events: AsyncIterator[str]) -> AsyncIterator[bytes]:
    try:
        async for line in events:
            yield _encoded(line)
    except Exception as error:  # noqa: BLE001  # the status is sent already: the client reads any error as an event
        yield _encoded(event(_refusal_of(error).body()))


class Guard:
    """Middleware that asks for a key, for JSON, and for the name of this computer; arguments as in `LocalServer`."""

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], only_local_names: bool) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in api_keys]
        self._only_local_names = only_local_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            refusal = self._refusal(Request(scope))
            if refusal is not None:
                await _reply_of(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> Refused | None:
        host = request.headers.get("host", "").rpartition(":")
        name = host[0] if host[2].isdecimal() and host[0] else request.headers.get("host", "")
        if self._only_local_names and name.lower() not in _LOCAL_HOSTS:
            return Refused(
                403,
                f"this server has no key, so it answers requests to {', '.join(_LOCAL_HOSTS)} only, not to {name!r}; "
                "start it with --api-key to serve other names",
                type="permission_error",
            )
        is_guarded = request.url.path.startswith("/v1")
        if self._api_keys and is_guarded and not self._has_key(request):
            return Refused(
                401,
                "this server asks for its API key: send the header Authorization: Bearer KEY",
                type="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            return Refused(415, "send JSON, with the header Content-Type: application/json")
        return None

    def _has_key(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._api_keys]
        return scheme.lower() == "bearer" and any(matches)


async def _bytes(request: Request) -> bytes:
    """Return the body unparsed. Raises Refused (413) once it is too large, without reading the rest."""
    try:
        return await whole_body(request.stream())
    except ConfigError as error:
        raise Refused(413, str(error), headers={"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise Refused(499, _GONE) from error


def _unknown_model(name: object, served: Sequence[str]) -> Refused:
    message = f"the model {shown(name)} is not served here; write {' or '.join(served)}"
    return Refused(404, message, code="model_not_found", param="model")


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of work on an answer; give it up if the client closes the connection meanwhile."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_is_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refused(499, _GONE)
        return working.result()
    finally:
        for task in (working, gone):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _is_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _reply_of(refusal: Refused) -> Response:
    return Reply(refusal.body(), status_code=refusal.status, headers=dict(refusal.headers) or None)


def _refusing(act: Act) -> Act:
    """Return a route whose errors are replies in OpenAI's form."""

    async def reply(request: Request) -> Response:
        try:
            return await act(request)
        except Exception as error:  # noqa: BLE001  # clients read any error in OpenAI's form, and 500 is logged
            return _reply_of(_refusal_of(error))

    return reply


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = (
        f"{request.method} {request.url.path}: {error.detail}; see GET /v1/models and POST {CHAT}"
    )
    headers = dict(error.headers or {})
    return _reply_of(Refused(error.status_code, message, headers=headers))


def _refusal_of(error: Exception) -> Refused:
    """Return the refusal for an error; what is not the client's fault is logged."""
    refusal = refused(error)
    if refusal.status == 500:
        logger.error("A request has failed", exc_info=error)
    elif refusal.status == 499:
        logger.debug("A request has ended early: %s", refusal.message)
    return refusal
