"""The engine whose model runs behind a URL, in a server that `cachecraft serve` started. It needs no vLLM here."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx

from cachecraft_rag.checks import check_number, check_text, listed
from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import ConfigError, ContextLengthError, ServerError, UnsupportedCallError
from cachecraft_rag.model.facts import DiskSpace
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.prompt.builder import Turn
from cachecraft_rag.prompt.tools import Tool
from cachecraft_rag.serving.answer_text import answer_text
from cachecraft_rag.serving.priming import Primer
from cachecraft_rag.serving.request import Request, RequestProgress
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import RowFilter
from cachecraft_rag.store.durable import Caches, Evicted
from cachecraft_rag.store.row_checks import Found
from cachecraft_rag.types import Chunk, KVLayout, Prompt, Segment
from cachecraft_rag.vllm.served_model import PROTOCOL, TOKENIZER_FILES, ServedModel
from cachecraft_rag.vllm.server.documents import ADMIN_HEADER, FIELD, MOST_DOCUMENTS, MOST_PRIMED

logger = logging.getLogger("cachecraft_rag.vllm")

_START = "start one with `cachecraft serve MODEL`"


@dataclass(frozen=True)
class SentRequest(Request):
    """A request whose texts go to a server, which lays the prompt out anew.

    body  of the chat request
    """

    body: Mapping[str, Any] = field(default_factory=dict)


class HTTPEngine(AnswerEngine):
    """Answers questions over chunks with a model that a server runs. Make one with `connect`.

    Chunks, history and question travel as texts. Prompts are also laid out here, with the server's own tokenizer: a
    question that does not fit is refused at once, and chunks and memories of the frameworks are measured in the model's
    tokens. Chunk-caches stay with the server.
    """

    def __init__(self, link: Link, model: ServedModel, facts: Mapping[str, Any], *, system: str) -> None:
        reuse = ReuseConfig(**facts["reuse"])
        super().__init__(
            model, ServerCaches(link), EngineConfig(namespace=facts["namespace"], system=system, reuse=reuse)
        )
        self._link, self._model, self._facts, self._system = link, model, facts, system
        self._unreported: dict[str, Callable[[], None]] = {}  # take the report of an answer that has ended, by its id

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        model: str | None = None,
        system: str | None = None,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout_s: float = 60.0,
    ) -> Self:
        """Connect to a server that `cachecraft serve` started.

        Args:
            url: such as "http://127.0.0.1:8000".
            model: name of the model that the server must serve, as it was started with; None: any.
            system: an instruction instead of the server's. The server takes it for private text, unless it was started
                with --shared-system.
            api_key: the key that the server was started with, if it asks for one (`--api-key`).
            admin_key: one of its `--admin-key-file`, if it has one: to prime and evict.
            timeout_s: longest silence of the server.

        Raises:
            ServerError: nothing answers, or something else does; it says what to do.
            ConfigError: an argument is out of range.
        """
        check_text("url", url, empty=False)
        for name, text in {"model": model, "system": system, "api_key": api_key, "admin_key": admin_key}.items():
            check_text(name, text, optional=True)
        check_number("timeout_s", timeout_s, above=True, most=1e6)
        with ExitStack() as opened:
            link = Link(url, api_key=api_key, admin_key=admin_key, timeout_s=timeout_s)
            opened.callback(link.close)
            facts = link.facts()
            if model is not None and facts["model"] != model:
                raise ServerError(f"{url} serves {facts['model']}, not {model}: name another server, or this model")
            served = _served_model(facts, link.call("/v1/cachecraft/tokenizer")["files"])
            engine = cls(link, served, facts, system=facts["system"] if system is None else system)
            opened.pop_all()
        return engine

    def primer(self) -> Primer:
        """Make the `ServerPrimer` of this engine."""
        return ServerPrimer(self, self._link)

    def disk_space(self) -> DiskSpace:
        """Space of the server's store."""
        return DiskSpace(**self._link.call("/v1/cachecraft/prime", {"documents": [], "estimate": True})["disk"])

    def capture(self, prompt: Prompt, captures: Sequence[int], *, primed: bool) -> None:
        """Raise UnsupportedCallError: a server captures texts, not tokens."""
        raise UnsupportedCallError("a server captures texts: use engine.primer().prime(chunks)")

    def look_up(self, segments: Sequence[Segment], *, session: str | None = None) -> Found:
        """Raise UnsupportedCallError: the chunk-caches are the server's."""
        raise UnsupportedCallError("the chunk-caches are the server's: engine.primer().missing(chunks) asks it")

    def close(self) -> None:
        """Close the connection; answers under way end."""
        if self._home.here:
            self._link.close()

    def _request(
        self,
        question: str,
        chunks: Iterable[Chunk],
        *,
        history: Iterable[Turn],
        session: str | None,
        sampling: SamplingParams,
        config: ReuseConfig | None,
        tools: Sequence[Tool],
    ) -> Request:
        chunks, history = listed("chunks", chunks), listed("history", history)
        if tools or any(role in ("calls", "result") for role, _ in history):
            raise UnsupportedCallError(
                "a server calls no tools together with documents: use an engine in this process, or let another model "
                "be the agent and give it this chain as a tool"
            )
        request = super()._request(
            question, chunks, history=history, session=session, sampling=sampling, config=config, tools=()
        )
        messages = [{"role": role, "content": text} for role, text in [*history, ("user", question)]]
        if self._system != self._facts["system"]:
            messages.insert(0, {"role": "system", "content": self._system})
        body: dict[str, Any] = {
            "model": self._model.name,
            "messages": messages,
            **_documents(chunks),
            "stream": True,
            "return_token_ids": True,
            "max_completion_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            # Otherwise the model's own defaults apply, which the other engines do not use.
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(self._model.end_tokens),
        }
        if sampling.json_schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": json.loads(str(sampling.json_schema))},
            }
        if config is not None:
            body[FIELD] = asdict(config)
        return SentRequest(request.prompt, request.config, sampling, session, request.started, body=body)

    def _pieces(self, request: Request, progress: RequestProgress) -> Generator[str]:
        self._home.require()
        assert isinstance(request, SentRequest), "made by _request"
        # The header that names a session, where the server trusts one; without it nothing private is kept.
        header, session = self._facts["session_header"], request.session
        headers = {} if header is None or session is None else {header: session}
        names: list[str] = []
        try:
            with closing(self._link.events(request.body, headers=headers)) as events:
                tokens = _tokens(events, names)
                yield from answer_text(request, progress, tokens, self._model.tokenizer, self._model.end_tokens)
        finally:
            progress.end(request, "closed")
            if names:
                self._unreported[request.request_id] = lambda: progress.reported(
                    self._link.report(names[-1], headers=headers)
                )

    def _ended(self, stats: Callable[[], RequestStats], error: str | None) -> None:
        # Here, because neither the reader who closes an answer nor a finaliser should wait for the server.
        report = self._unreported.pop(stats().request_id, None)
        try:
            if report is not None and error is None:
                report()
        except (LookupError, TypeError, ValueError, AttributeError):  # the answer itself is complete
            logger.warning("The server's statistics of a request make no sense", exc_info=True)
        super()._ended(stats, error)


class ServerPrimer(Primer):
    """Primes chunks in the server, as many in one request as it takes; see `Primer`.

    Where a document needs several requests, each begins behind the instruction alone.
    """

    def __init__(self, engine: HTTPEngine, link: Link) -> None:
        super().__init__(engine)
        self._link = link

    def prime(self, chunks: Sequence[Chunk], *, captured: Callable[[int], None] = lambda _count: None) -> int:
        """See `Primer.prime`; `captured` is called once a request."""
        total = 0
        for some in request_sized(chunks):
            count = int(self._link.call("/v1/cachecraft/prime", _documents(some), patient=True)["captured"])
            captured(count)
            total += count
        return total

    def missing(self, chunks: Sequence[Chunk]) -> dict[str, int]:
        """See `Primer.missing`."""
        found: dict[str, int] = {}
        for some in request_sized(chunks):
            found |= self._link.call("/v1/cachecraft/prime", _documents(some) | {"estimate": True})["missing"]
        return found

    def capture(self, chunk: Chunk, after: Sequence[Chunk] = ()) -> int:
        """Raise UnsupportedCallError: a server captures whole documents."""
        raise UnsupportedCallError("a server captures documents: use prime")


class ServerCaches(Caches):
    """The chunk-caches in a server's store."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def evict(self, chosen: RowFilter | None = None) -> Evicted:
        """See `Caches.evict`; by chunk ids only. Raises ServerError, and UnsupportedCallError for any other choice."""
        if chosen is None or chosen != RowFilter(chunk_ids=chosen.chunk_ids) or chosen.chunk_ids is None:
            raise UnsupportedCallError("a server evicts by chunk ids: RowFilter(chunk_ids=…)")
        if not chosen.chunk_ids:
            return Evicted(0, 0)
        return Evicted(**self._link.call("/v1/cachecraft/evict", {"chunk_ids": list(chosen.chunk_ids)}))


class Link:
    """HTTP requests to one server; thread-safe."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float, admin_key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        headers |= {} if admin_key is None else {ADMIN_HEADER: admin_key}
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {url!r}; write for example http://127.0.0.1:8000")
        try:
            self._client = httpx.Client(base_url=self._url, headers=headers, timeout=timeout_s)
        except httpx.InvalidURL as error:
            raise ConfigError(f"url is {url!r} ({error}); write for example http://127.0.0.1:8000") from error

    def close(self) -> None:
        """Close the connections; requests under way fail."""
        self._client.close()

    def facts(self) -> dict[str, Any]:
        """Facts about the server. Raises ServerError where it is none of ours, or of another version."""
        found = self.call("/v1/cachecraft")
        if not isinstance(found, dict) or "protocol" not in found:
            raise ServerError(self._not_ours())
        if found["protocol"] != PROTOCOL:
            raise ServerError(
                f"{self._url} runs version {found.get('version')} of this package, which speaks another protocol; "
                "install the same version on both sides"
            )
        return found

    def call(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        patient: bool = False,
    ) -> Any:
        """A JSON answer, to a JSON body if there is one. Raises ServerError, and ConfigError for a refused body.

        Args:
            patient: wait for as long as the server computes.
        """
        timeout = None if patient else httpx.USE_CLIENT_DEFAULT
        with self._answered(path, body, headers=headers, timeout=timeout) as answer:
            answer.read()
        try:
            return answer.json()
        except ValueError as error:
            raise ServerError(self._not_ours()) from error

    @contextmanager
    def _answered(self, path: str, body: Mapping[str, Any] | None, **how: Any) -> Iterator[httpx.Response]:
        try:
            with self._client.stream("GET" if body is None else "POST", path, json=body, **how) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise self._error(answer)
                yield answer
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def report(self, name: str, *, headers: Mapping[str, str]) -> Mapping[str, Any]:
        """The report of a request; empty where the server has none."""
        try:
            found = self.call(f"/v1/cachecraft/requests/{quote(name, safe='')}", headers=headers)
        except (ServerError, RuntimeError) as error:  # or this client is closed; the answer itself is complete
            logger.warning("The statistics of request %s did not come: %s", name, error)
            return {}
        return found.get("report") or {}

    def events(self, body: Mapping[str, Any], *, headers: Mapping[str, str]) -> Generator[dict[str, Any]]:
        """The events of a streamed chat completion. Raises ServerError, ConfigError, ContextLengthError."""
        with self._answered("/v1/chat/completions", body, headers=headers) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(f"{self._url}: {event['error'].get('message', event['error'])}")
                yield event
        raise ServerError(f"{self._url} ended the answer halfway; see its log, and ask again")

    def _error(self, answer: httpx.Response) -> Exception:
        try:
            message = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):  # not in vLLM's form
            message = answer.text[:200]
        if answer.status_code == 403 and ADMIN_HEADER in message:
            return ServerError(f"{self._url}: {message}: connect(…, admin_key=…)")
        if answer.status_code in (401, 403):
            return ServerError(f"{self._url} asks for a key: connect(…, api_key=…)")
        if answer.status_code == 404 and answer.url.path.endswith("/v1/cachecraft"):
            return ServerError(self._not_ours())
        if answer.status_code == 400:
            return ContextLengthError(message) if "context" in message else ConfigError(message)
        return ServerError(f"{self._url} answered {answer.status_code}: {message}")

    def _unreachable(self, error: Exception) -> ServerError:
        return ServerError(f"{self._url} does not answer ({type(error).__name__}: {error}); {_START}")

    def _not_ours(self) -> str:
        return f"{self._url} answers, but is no server of this package (an ordinary vLLM?); {_START}"


def request_sized(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Divide chunks into runs that the server takes in one request to prime.

    >>> [len(some) for some in request_sized([Chunk("a")] * (MOST_DOCUMENTS + 1))]
    [1000, 1]
    """
    run: list[Chunk] = []
    size = 0
    for chunk in chunks:
        if run and (len(run) == MOST_DOCUMENTS or size + len(chunk.text) > MOST_PRIMED):
            yield run
            run, size = [], 0
        run.append(chunk)
        size += len(chunk.text)
    if run:
        yield run


def _documents(chunks: Iterable[Chunk]) -> dict[str, Any]:
    return {"documents": [{"text": chunk.text, "id": chunk.chunk_id} for chunk in chunks]}


def _tokens(events: Iterable[Mapping[str, Any]], names: list[str]) -> Iterator[int]:
    """The new tokens of a streamed chat completion; `names` takes up its id."""
    for event in events:
        names.append(event.get("id", ""))
        for choice in event.get("choices", ()):
            yield from choice.get("token_ids") or ()


def _served_model(facts: Mapping[str, Any], files: Mapping[str, str]) -> ServedModel:
    """The model as a client knows it, with the tokenizer that the server sent."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="cachecraft-") as folder:
        for name in TOKENIZER_FILES:  # and no other name that a server might send
            if name in files:
                (Path(folder) / name).write_text(files[name], encoding="utf-8")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ServerError(f"the tokenizer that the server sent cannot be read: {error}") from error
    return ServedModel(
        name=facts["model"],
        folder=None,
        tokenizer=tokenizer,
        fingerprint=facts["fingerprint"],
        layout=KVLayout(**facts["layout"]),
        context_length=facts["context_length"],
        end_tokens=frozenset(facts["end_tokens"]),
    )
