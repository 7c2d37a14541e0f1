"""The engine whose model runs behind a URL, in a server that `cachecraft serve` started. It needs no vLLM here."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx

from cachecraft_rag.checks import check_number, check_path, check_text
from cachecraft_rag.engine.base import CACHE_FOLDER, AnswerEngine, DiskSpace, PathLike
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.priming import Primer
from cachecraft_rag.engine.prompt import Turn
from cachecraft_rag.engine.request import Request, answer_text
from cachecraft_rag.errors import ConfigError, ContextLengthError, ServerError, UnsupportedCallError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.store.durable import Evicted
from cachecraft_rag.store.expected import Found
from cachecraft_rag.types import Chunk, KVLayout, Prompt, Segment
from cachecraft_rag.vllm.documents import FIELD
from cachecraft_rag.vllm.records import take_report
from cachecraft_rag.vllm.served import PROTOCOL, TOKENIZER_FILES, ServedModel

logger = logging.getLogger("cachecraft_rag.vllm")

_START = "start one with `cachecraft serve MODEL`"


@dataclass
class Sent(Request):
    """A request whose texts go to a server, which lays the prompt out anew.

    body  of the chat request
    """

    body: Mapping[str, Any] | None = None


class HTTPEngine(AnswerEngine):
    """Answers questions over chunks with a model that a server runs. Make one with `connect`.

    Chunks, history and question travel as texts; prompts are also laid out here, with the server's own tokenizer, to
    say at once what does not fit.
    """

    def __init__(
        self, link: Link, model: ServedModel, store: ServerStore, facts: Mapping[str, Any], *, system: str
    ) -> None:
        reuse = ReuseConfig(**facts["reuse"])
        config = EngineConfig(namespace=facts["namespace"], system=system, reuse=reuse, store=store.config)
        super().__init__(model, store, config)
        self._link, self._model, self._facts, self._system = link, model, facts, system

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        store: PathLike = "chunk-caches",
        model: str | None = None,
        system: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
    ) -> Self:
        """Connect to a server that `cachecraft serve` started.

        Args:
            url: such as "http://127.0.0.1:8000".
            store: a folder on this machine; chunk-caches stay with the server, and where both use one folder, that is
                fine.
            model: what the server must serve, by the name it was started with; None: whatever it is.
            system: an instruction instead of the server's. The server takes it for private text, unless it was started
                with --shared-system.
            api_key: what the server was started with, if it asks for one (`--api-key`).
            timeout_s: how long the server may be silent.

        Raises:
            ServerError: nothing answers, or something else does; it says what to do.
            ConfigError: an argument is out of range.
        """
        check_text("url", url, empty=False)
        check_path("store", store)
        check_text("model", model, optional=True)
        check_text("system", system, optional=True)
        check_text("api_key", api_key, optional=True)
        check_number("timeout_s", timeout_s, above=True, most=1e6)
        with ExitStack() as opened:
            link = Link(url, api_key=api_key, timeout_s=timeout_s)
            opened.callback(link.close)
            facts = link.facts()
            if model is not None and facts["model"] != model:
                raise ServerError(f"{url} serves {facts['model']}, not {model}: name another server, or this model")
            served = _served_model(facts, link.get("/v1/cachecraft/tokenizer")["files"])
            caches = opened.enter_context(ServerStore.open(Path(store) / CACHE_FOLDER))
            caches.link = link
            engine = cls(link, served, caches, facts=facts, system=facts["system"] if system is None else system)
            opened.pop_all()
        return engine

    def primer(self) -> Primer:
        """Captures chunks in the server."""
        return ServerPrimer(self, self._link)

    def disk_space(self) -> DiskSpace:
        """Of the server's store."""
        return DiskSpace(**self._link.post("/v1/cachecraft/prime", {"documents": [], "estimate": True})["disk"])

    def capture(self, prompt: Prompt, captures: Sequence[int], *, primed: bool) -> None:
        """Not over HTTP: a server captures texts, not tokens. Raises UnsupportedCallError."""
        raise UnsupportedCallError("a server captures texts: use engine.primer().prime(chunks)")

    def look_up(self, segments: Sequence[Segment], *, session: str | None = None) -> Found:
        """Not over HTTP. Raises UnsupportedCallError."""
        raise UnsupportedCallError("the chunk-caches are the server's: engine.primer().missing(chunks) asks it")

    def close(self) -> None:
        """Close the connection; answers under way end."""
        if not self._home.here:
            return
        self._background.close()
        self.store.close()
        self._link.close()

    def _addressed(
        self,
        request: Request,
        question: str,
        chunks: Sequence[Chunk],
        history: Sequence[Turn],
        config: ReuseConfig | None,
    ) -> Request:
        sampling = request.sampling
        messages = [{"role": role, "content": text} for role, text in [*history, ("user", question)]]
        if self._system != self._facts["system"]:
            messages.insert(0, {"role": "system", "content": self._system})
        body: dict[str, Any] = {
            "model": self._model.name,
            "messages": messages,
            "documents": [{"text": chunk.text} for chunk in chunks],
            "stream": True,
            "return_token_ids": True,
            "max_completion_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            # Otherwise the model's own defaults apply, which no other engine here knows.
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(self._model.end_tokens),
        }
        if config is not None:
            body[FIELD] = asdict(config) | {"ablate": sorted(config.ablate)}
        return Sent(request.prompt, request.config, sampling, request.session, request.started, body=body)

    def _pieces(self, request: Request) -> Generator[str]:
        self._home.require()
        assert isinstance(request, Sent), "made by _addressed"
        assert request.body is not None
        names: list[str] = []
        try:
            with closing(self._link.events(request.body, headers=self._session(request.session))) as events:
                tokens = _tokens(request, events, names)
                yield from answer_text(request, tokens, self._model.tokenizer, self._model.end_tokens)
        finally:
            request.finish = request.finish or "closed"
            request.ended_s = request.clock()
            if names and request.finish in ("end", "length"):
                told = self._link.statistics(names[-1], headers=self._session(request.session))
                take_report(request, told)

    def _session(self, session: str | None) -> dict[str, str]:
        """The header that names a session, where the server trusts one; without it nothing private is kept."""
        header = self._facts["session_header"]
        return {} if header is None or session is None else {header: session}


class ServerPrimer(Primer):
    """Has the server capture chunks; see `Primer`."""

    def __init__(self, engine: HTTPEngine, link: Link) -> None:
        super().__init__(engine)
        self._link = link

    def prime(self, chunks: Sequence[Chunk], *, captured: Callable[[int], None] = lambda _count: None) -> int:
        """See `Primer.prime`; `captured` is called once, at the end."""
        count = int(self._link.post("/v1/cachecraft/prime", _documents(chunks), patient=True)["captured"])
        captured(count)
        return count

    def missing(self, chunks: Sequence[Chunk]) -> dict[str, int]:
        """See `Primer.missing`."""
        found = self._link.post("/v1/cachecraft/prime", _documents(chunks) | {"estimate": True})
        return dict(found["missing"])

    def capture(self, chunk: Chunk, behind: Sequence[Chunk] = ()) -> int:
        """Not over HTTP. Raises UnsupportedCallError."""
        raise UnsupportedCallError("a server captures documents: use prime")


class ServerStore(ChunkCacheStore):
    """A folder of this machine; what is evicted from it, the server evicts too."""

    link: Link | None = None

    def evict(self, chosen: RowFilter | None = None, *, down_to_bytes: int | None = None) -> Evicted:
        """See `ChunkCacheStore.evict`; the server is told the chunk ids. Raises ServerError."""
        here = super().evict(chosen, down_to_bytes=down_to_bytes)
        if self.link is None or chosen is None or not chosen.chunk_ids:
            return here
        there = self.link.post("/v1/cachecraft/evict", {"chunk_ids": list(chosen.chunk_ids)})
        return Evicted(here.variants + int(there["variants"]), here.nbytes + int(there["nbytes"]))


class Link:
    """HTTP requests to one server; thread-safe."""

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {url!r}; write for example http://127.0.0.1:8000")
        try:
            self._client = httpx.Client(base_url=self._url, headers=headers, timeout=timeout_s)
        except httpx.InvalidURL as error:
            raise ConfigError(f"url is {url!r} ({error}); write for example http://127.0.0.1:8000") from error

    def close(self) -> None:
        """End what is under way."""
        self._client.close()

    def facts(self) -> dict[str, Any]:
        """What the server says of itself. Raises ServerError where it is none of ours, or of another version."""
        found = self._checked(lambda: self._client.get("/v1/cachecraft"), missing=self._not_ours())
        if not isinstance(found, dict) or "protocol" not in found:
            raise ServerError(self._not_ours())
        if found["protocol"] != PROTOCOL:
            raise ServerError(
                f"{self._url} runs version {found.get('version')} of this package, which speaks another protocol; "
                "install the same version on both sides"
            )
        return found

    def get(self, path: str) -> Any:
        """A JSON answer. Raises ServerError."""
        return self._checked(lambda: self._client.get(path), missing=self._not_ours())

    def post(self, path: str, body: Mapping[str, Any], *, patient: bool = False) -> Any:
        """A JSON answer to a JSON body. Raises ServerError, and ConfigError for what the server refuses.

        Args:
            patient: wait for as long as the server computes.
        """
        timeout: Any = None if patient else httpx.USE_CLIENT_DEFAULT
        return self._checked(lambda: self._client.post(path, json=body, timeout=timeout), missing=self._not_ours())

    def statistics(self, name: str, *, headers: Mapping[str, str]) -> Mapping[str, Any]:
        """The report of a request; empty where the server has none."""
        try:
            answer = self._client.get(f"/v1/cachecraft/requests/{quote(name, safe='')}", headers=dict(headers))
            told = answer.json() if answer.status_code == 200 else {}
        except (httpx.HTTPError, ValueError) as error:  # the answer itself is complete
            logger.warning("The statistics of request %s did not come: %s", name, error)
            return {}
        return told.get("report") or {}

    def events(self, body: Mapping[str, Any], *, headers: Mapping[str, str]) -> Generator[dict[str, Any]]:
        """The events of a streamed chat completion. Raises ServerError, ConfigError, ContextLengthError."""
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body, headers=dict(headers)) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise self._error(answer, missing=self._not_ours())
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
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        raise ServerError(f"{self._url} ended the answer halfway; see its log, and ask again")

    def _checked(self, send: Callable[[], httpx.Response], *, missing: str) -> Any:
        try:
            answer = send()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if answer.status_code != 200:
            raise self._error(answer, missing=missing)
        try:
            return answer.json()
        except ValueError as error:
            raise ServerError(missing) from error

    def _error(self, answer: httpx.Response, *, missing: str) -> Exception:
        try:
            message = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):  # not in vLLM's form
            message = answer.text[:200]
        if answer.status_code in (401, 403):
            return ServerError(f"{self._url} asks for a key: connect(…, api_key=…)")
        if answer.status_code == 404:
            return ServerError(missing)
        if answer.status_code == 400:
            return ContextLengthError(message) if "context" in message else ConfigError(message)
        return ServerError(f"{self._url} answered {answer.status_code}: {message}")

    def _unreachable(self, error: Exception) -> ServerError:
        return ServerError(f"{self._url} does not answer ({type(error).__name__}: {error}); {_START}")

    def _not_ours(self) -> str:
        return f"{self._url} answers, but is no server of this package (an ordinary vLLM?); {_START}"


def _documents(chunks: Iterable[Chunk]) -> dict[str, Any]:
    return {"documents": [{"text": chunk.text} for chunk in chunks]}


def _tokens(request: Request, events: Iterable[Mapping[str, Any]], names: list[str]) -> Iterator[int]:
    """The new tokens of a streamed chat completion; `names` takes up its id."""
    for event in events:
        names.append(event.get("id", ""))
        new = [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
        if new:
            request.first_token_s = request.first_token_s or request.clock()
        yield from new


def _served_model(facts: Mapping[str, Any], files: Mapping[str, str]) -> ServedModel:
    """The model as far as a client knows it, with the tokenizer that the server sent."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="cachecraft-") as folder:
        for name in TOKENIZER_FILES:  # and no other name that a server might send
            if name in files:
                (Path(folder) / name).write_text(files[name], encoding="utf-8")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ServerError(f"the tokenizer that the server sent cannot be read: {error}") from error
    layout = KVLayout(**facts["layout"])
    return ServedModel(
        name=facts["model"],
        folder=None,
        tokenizer=tokenizer,
        fingerprint=facts["fingerprint"],
        layout=layout,
        context_length=facts["context_length"],
        end_tokens=frozenset(facts["end_tokens"]),
    )
