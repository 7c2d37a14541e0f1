"""The engine over HTTP: a server that `cachecraft serve` started runs the model. It needs no vLLM here."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Self

from cachecraft_rag.checks import check_number, check_text, listed
from cachecraft_rag.client import replies
from cachecraft_rag.client.link import Link, check_header
from cachecraft_rag.client.replies import ServerFacts, checked_reply
from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.engine.capabilities import Capabilities, Capability
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.documents import chunks_of
from cachecraft_rag.errors import ServerError, UnsupportedCallError
from cachecraft_rag.model.facts import DiskSpace
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.prompt.builder import Turn, checked_chunks
from cachecraft_rag.prompt.tools import Tool
from cachecraft_rag.server.served_model import ServedModel
from cachecraft_rag.server.wire import (
    EVICT,
    FIELD,
    HOLDS,
    MOST_DOCUMENTS,
    MOST_PRIMED,
    MOST_REMEMBERED,
    PRIME,
    READMIT,
)
from cachecraft_rag.serving.answer_text import answer_text
from cachecraft_rag.serving.audits.audit import Audit
from cachecraft_rag.serving.priming import DocumentPrimer, Primer, Related
from cachecraft_rag.serving.request import Request, RequestProgress
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import RowFilter
from cachecraft_rag.store.durable import Caches, Evicted
from cachecraft_rag.types.documents import Chunk, chunk_id_of
from cachecraft_rag.types.variants import HeldChunk

logger = logging.getLogger("cachecraft_rag.client")

_MISSING = Capabilities(
    {
        Capability.CAPTURE: "a server captures texts: use engine.primer().prime(chunks)",
        Capability.LOOK_UP: "the chunk-caches are the server's: engine.primer().missing(chunks) asks it",
        Capability.SYNC: (
            "the chunk-caches are the server's: name what was deleted, engine.remove(documents), or run "
            "`cachecraft store sync` where the server's store is"
        ),
        Capability.TOOLS: (
            "this client sends no tools: send them with documents to /v1/chat/completions from an OpenAI client, use "
            "an engine in this process, or let another model be the agent and give it this chain as a tool"
        ),
    }
)


@dataclass(frozen=True)
class SentRequest(Request):
    """A request whose texts are sent to a server, which builds the prompt a second time.

    body  body of the chat request
    """

    body: Mapping[str, object] = field(default_factory=dict)


class HTTPEngine(AnswerEngine):
    """Answers questions over chunks with a model that a server runs. Make one with `connect`.

    Chunks, history and question travel as texts. Prompts are built here too, with the server's tokenizer: a question
    that does not fit is refused at once, and the frameworks measure chunks and memories in the model's tokens.
    Chunk-caches stay with the server.
    """

    capabilities: ClassVar[Capabilities] = _MISSING

    def __init__(self, link: Link, model: ServedModel, facts: ServerFacts, *, system: str) -> None:
        config = EngineConfig(namespace=facts.namespace, system=system, reuse=facts.reuse)
        super().__init__(model, ServerCaches(link), config)
        self._link = link
        self._model = model
        self._facts = facts
        self._system = system
        self._has_warned = False  # of priming after another instruction
        # take the report of an answer that has ended, by its id
        self._unreported: dict[str, Callable[[], None]] = {}
        # id of a request → its id in the server, and the headers that it was sent with
        self._answered: dict[str, tuple[str, Mapping[str, str]]] = {}

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
        total_timeout_s: float | None = 600.0,
    ) -> Self:
        """Connect to a server that `cachecraft serve` started; close the engine.

        Args:
            url: such as "http://127.0.0.1:8000"; a "/v1" at its end is left out.
            model: name of the model that the server must serve, as it was started with; None: any.
            system: an instruction instead of the server's. Chunk-caches captured after it serve all who send the same
                one, unless the server was started with --private-system. `primer` captures chunks after the server's.
            api_key: the key that the server was started with, if it asks for a key (`--api-key`).
            admin_key: a key of its `--admin-key-file`, if it has such a file: to prime and evict.
            timeout_s: longest silence of the server, such as while a prompt waits and is computed.
            total_timeout_s: longest time of a whole answer, with its reader's pauses; None = no limit. Priming has
                neither limit.

        Raises:
            ServerError: no server of this version and model answers in time, or its tokenizer cannot be used.
            ConfigError: also if the environment names certificates or a proxy that cannot be used.
        """
        check_text("url", url, empty=False)
        for name, text in {
            "model": model,
            "system": system,
            "api_key": api_key,
            "admin_key": admin_key,
        }.items():
            check_text(name, text, optional=True, empty=name == "system")
        check_number("timeout_s", timeout_s, above=True, most=1e6)
        check_number("total_timeout_s", total_timeout_s, above=True, most=1e6, optional=True)
        with ExitStack() as opened:
            link = Link(
                url,
                api_key=api_key,
                admin_key=admin_key,
                timeout_s=timeout_s,
                total_timeout_s=total_timeout_s,
            )
            opened.callback(link.close)
            reply = link.facts()
            with checked_reply(link.url, "facts about itself"):
                facts = ServerFacts.of(reply)
            if model is not None and facts.model != model:
                name = replies.printable(facts.model)
                raise ServerError(
                    f"{url} serves {name}, not {model}: name another server, or this model"
                )

            files = link.tokenizer()
            with checked_reply(link.url, "a tokenizer"):
                served = replies.served_model(facts, files)
            with checked_reply(link.url, "a tokenizer or a chat template"):
                engine = cls(link, served, facts, system=facts.system)
            if system is not None:  # its errors are the caller's
                engine = cls(link, served, facts, system=system)
            opened.pop_all()
        return engine

    def primer(self, *, related: Related | None = None) -> DocumentPrimer:
        """Return the `ServerPrimer` of this engine; nothing is sent yet.

        If the engine has another instruction than the server, a warning is logged, once: the server captures chunks
        after its own, so questions of this engine reuse less of them.

        Args:
            related: returns the chunks of other documents that a chunk is likely to be retrieved with, best first; a
                document of one chunk is captured after them. None: the server captures it after a fixed passage.
        """
        priming = self
        if self._system != self._facts.system:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s captures chunks after its own instruction, and this engine's questions have another, so they "
                    "reuse less of them: start the server with this instruction (--system), or leave system out",
                    self._link.url,
                )
            priming = type(self)(self._link, self._model, self._facts, system=self._facts.system)
        return ServerPrimer(self, self._link, room=Primer(priming), related=related)

    def held(self, documents: Iterable[object], *, session: str | None = None) -> list[HeldChunk]:
        """Return what the server holds of each document, in order; of `session`, too, if the server has sessions.

        Documents are as in `prime`: texts, chunks, or those of a framework. Only ids are sent.
        """
        ids = [chunk.chunk_id for chunk in chunks_of(documents)]
        headers = self._session_headers(session)
        held: list[HeldChunk] = []
        for start in range(0, len(ids), MOST_DOCUMENTS):
            part = ids[start : start + MOST_DOCUMENTS]
            reply = self._link.call(HOLDS, {"chunk_ids": part}, headers=headers)
            with checked_reply(self._link.url, "the chunks that it holds"):
                held += replies.held_chunks(reply, part)
        return held

    def for_tenant(self, namespace: str) -> Self:
        """Raise UnsupportedCallError: the server's proxy names the tenant."""
        raise UnsupportedCallError(
            "the tenant is the server's: its proxy sets the header of `cachecraft serve --tenant-header`"
        )

    def disk_space(self) -> DiskSpace:
        """Return the disk space of the server's store in bytes, as the server counts it; needs the admin key."""
        reply = self._link.call(PRIME, {"documents": [], "estimate": True})
        with checked_reply(self._link.url, "the size of its store"):
            return replies.disk_space(reply)

    def close(self) -> None:
        """Close the connection; answers under way fail with ServerError."""
        if self._home.here:
            self._link.close()

    def audit_of(self, request_id: str) -> Audit | None:
        """Return the server's audit of an answer, by the `request_id` of its statistics; None: it has none, or not yet.

        An answer that has not ended, or is not one of the last 1,000 of this engine, has none, and the server is not
        asked. Raises ServerError if the answer is not among the last 1,000 that the server remembers.
        """
        asked = self._answered.get(request_id)
        if asked is None:
            return None
        name, headers = asked
        return self._link.audit(name, headers=headers)

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
    ) -> SentRequest:
        """Check a question and build its prompt, and the body that is sent to the server.

        Raises ConfigError for a session that no header can hold.
        """
        history = listed("history", history)
        chunks = listed("chunks", chunks)
        request = super()._request(
            question,
            chunks,
            history=history,
            session=session,
            sampling=sampling,
            config=config,
            tools=tools,
        )
        self._session_headers(session)
        turns = [*history, ("user", question)]
        body = self._body(turns, chunks, sampling)
        if config is not None:
            body[FIELD] = asdict(config)
        return SentRequest(
            request.prompt,
            request.config,
            sampling,
            session,
            request.started,
            body=body,
        )

    def _body(
        self, turns: Sequence[Turn], chunks: Sequence[Chunk], sampling: SamplingParams
    ) -> dict[str, object]:
        """Return the body of a chat request, without settings of reuse; `turns` end with the question."""
        messages = [{"role": role, "content": _sendable(text)} for role, text in turns]
        if self._system != self._facts.system:
            messages.insert(0, {"role": "system", "content": self._system})
        body: dict[str, object] = {
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
        return body

    def _pieces(self, request: Request, progress: RequestProgress) -> Generator[str]:
        self._home.require()
        assert isinstance(request, SentRequest), "made by _request"
        headers = self._session_headers(request.session)
        names: list[str] = []
        try:
            with closing(self._link.events(request.body, headers=headers)) as events:
                tokens = self._tokens(events, names)
                yield from answer_text(
                    request, progress, tokens, self._model.tokenizer, self._model.end_tokens
                )
        finally:
            progress.end(request, "closed")
            if names:
                self._answered[request.request_id] = names[-1], headers
                if len(self._answered) > MOST_REMEMBERED:
                    self._answered.pop(next(iter(self._answered)), None)
                self._unreported[request.request_id] = lambda: progress.reported(
                    self._link.report(names[-1], headers=headers)
                )

    def _session_headers(self, session: str | None) -> dict[str, str]:
        """Return the header that names a session, where the server trusts one; without it nothing private is kept."""
        header = self._facts.session_header
        if header is None or session is None:
            return {}
        check_header("session", session)
        return {header: session}

    def _tokens(self, events: Iterable[Mapping[str, object]], names: list[str]) -> Iterator[int]:
        """Yield the new tokens of a streamed chat completion; `names` takes up its id."""
        for event in events:
            with checked_reply(self._link.url, "an answer"):
                tokens = replies.new_tokens(event)
                name = replies.text_of(event.get("id", ""))
            names.append(name)
            yield from tokens

    def _ended(self, stats: Callable[[], RequestStats], error: str | None) -> None:
        # Here, because neither the reader that closes an answer nor a finaliser should wait for the server.
        report = self._unreported.pop(stats().request_id, None)
        try:
            if report is not None and error is None:
                report()
        # the answer itself is complete
        except (LookupError, TypeError, ValueError, AttributeError) as problem:
            logger.warning(
                "The server's statistics of a request cannot be read: %s",
                replies.printable(problem),
            )
        super()._ended(stats, error)


class ServerPrimer:
    """Primes chunks in the server, after the server's own instruction, as many in one request as it takes.

    If a document needs several requests, each begins after the instruction only. The server asks for its admin key.

    Args:
        room: measures chunks with the server's instruction, which may be another one than the engine's.
        related: see `HTTPEngine.primer`; called for the chunk of a request that has only one.
    """

    def __init__(
        self, engine: HTTPEngine, link: Link, *, room: Primer, related: Related | None = None
    ) -> None:
        self.engine = engine
        self._link = link
        self._room = room
        self._related = related

    def prime(
        self, chunks: Sequence[Chunk], *, captured: Callable[[int], None] = lambda _count: None
    ) -> int:
        """Capture one document's chunks in order, in the server; return the number of captures, stored by then.

        The instruction is captured, and counts, too. Chunks that are stored after the same neighbours are skipped. If a
        request fails, the captures of earlier requests stay, and no later one is sent; one chunk that does not fit a
        pass (`fits`) fails its whole request. There is no time limit while the server computes.

        Args:
            chunks: the chunks of one document, in its order; without chunks nothing is sent.
            captured: called after each request with the number of its captures, which may be 0.
        """
        total = 0
        for part in request_sized(checked_chunks(chunks)):
            reply = self._link.call(PRIME, self._body(part), patient=True)
            with checked_reply(self._link.url, "a number of captures"):
                count = replies.whole_of(replies.mapping_of(reply)["captured"])
            captured(count)
            total += count
        return total

    def missing(self, chunks: Sequence[Chunk]) -> dict[str, int]:
        """Return variant id → tokens of what `prime` would capture now, the instruction too; {} if all is stored."""
        missing: dict[str, int] = {}
        for part in request_sized(checked_chunks(chunks)):
            reply = self._link.call(PRIME, self._body(part) | {"estimate": True})
            with checked_reply(self._link.url, "an estimate"):
                missing |= replies.missing_variants(reply)
        return missing

    def fits(self, chunk: Chunk) -> bool:
        """Return True if a pass has room for the chunk after the server's instruction, counted here; sends nothing."""
        return self._room.fits(chunk)

    def _body(self, chunks: Sequence[Chunk]) -> dict[str, object]:
        """Return the body of a request to prime: the chunks, and what a document of one chunk is captured after."""
        body = _documents(chunks)
        if len(chunks) == 1 and self._related is not None:
            body["related"] = _documents(self._related(chunks[0]))["documents"]
        return body


class ServerCaches(Caches):
    """The chunk-caches of this client's tenant, of all sessions, in a server's store, which asks for its admin key."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def evict(
        self, chosen: RowFilter | None = None, *, down_to_bytes: int | None = None
    ) -> Evicted:
        """Remove the chunk-caches of `chosen.chunk_ids`; return their number, and their bytes on the server's disk.

        Those on its remote stay. Ids that are not stored count as 0; without ids the server is not asked. Raises
        UnsupportedCallError unless `chosen` filters by chunk ids alone, and for `down_to_bytes`.
        """
        if (
            down_to_bytes is not None
            or chosen is None
            or chosen != RowFilter(chunk_ids=chosen.chunk_ids)
            or chosen.chunk_ids is None
        ):
            raise UnsupportedCallError("a server evicts by chunk ids: RowFilter(chunk_ids=…)")
        if not chosen.chunk_ids:
            return Evicted(0, 0)
        reply = self._link.call(EVICT, {"chunk_ids": list(chosen.chunk_ids)})
        with checked_reply(self._link.url, "the result of an eviction"):
            return replies.evicted(reply)

    def remove_chunks(self, chunk_ids: Sequence[str]) -> Evicted:
        """Remove the chunk-caches that hold or were shaped by these chunks, and refuse new ones until `readmit_chunks`.

        Those on its remote leave too, uncounted. Returns the number removed, and their bytes on the server's disk.
        Without ids the server is not asked.
        """
        if not chunk_ids:
            return Evicted(0, 0)
        body = {"chunk_ids": list(chunk_ids), "removed": True}
        reply = self._link.call(EVICT, body)
        with checked_reply(self._link.url, "the result of an eviction"):
            return replies.evicted(reply)

    def readmit_chunks(self, chunk_ids: Sequence[str]) -> frozenset[str]:
        """Let these chunks be stored again, () lets in none; return the ids of all chunks that stay removed."""
        reply = self._link.call(READMIT, {"chunk_ids": list(chunk_ids)})
        with checked_reply(self._link.url, "the removed chunks"):
            return replies.removed_chunks(reply)


def request_sized(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Divide chunks, in order, into parts that the server takes in one request to prime: yield each as a list.

    A part has at most `MOST_DOCUMENTS` chunks with together at most `MOST_PRIMED` characters. A longer chunk is a part
    alone, and the server may refuse it.

    >>> [len(part) for part in request_sized([Chunk("a")] * (MOST_DOCUMENTS + 1))]
    [1000, 1]
    """
    part: list[Chunk] = []
    size = 0
    for chunk in chunks:
        is_full = len(part) == MOST_DOCUMENTS or size + len(chunk.text) > MOST_PRIMED
        if part and is_full:
            yield part
            part = []
            size = 0
        part.append(chunk)
        size += len(chunk.text)
    if part:
        yield part


def _documents(chunks: Iterable[Chunk]) -> dict[str, object]:
    documents = []
    for chunk in chunks:
        text = _sendable(chunk.text)
        is_whole = text == chunk.text
        documents.append({"text": text, "id": chunk.chunk_id if is_whole else chunk_id_of(text)})
    return {"documents": documents}


def _sendable(text: str) -> str:
    """Return the text as a model reads it, with "?" for half a surrogate pair, which no server takes."""
    return text.encode("utf-8", "replace").decode()
