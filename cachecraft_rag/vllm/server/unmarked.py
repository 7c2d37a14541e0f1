"""Reuse in requests without `documents`: prompts of any client, as vLLM has rendered them (`prompt.unmarked`).

vLLM's own handlers render and tokenise such a prompt. Its token ids are searched on their way to vLLM's engine:
messages of the user, results of tools, and system messages if the settings say so. The rest is prefix or computed.
vLLM's prefix cache takes precedence: a prompt is served from chunk-caches only if they hold more of it than the prefix
cache has from an earlier prompt. vLLM computes all other prompts itself, as if there were no chunk-caches.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from prometheus_client import Counter

from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import make_plan
from cachecraft_rag.prompt.unmarked import (
    MIN_TEXT_TOKENS,
    PromptPiece,
    candidates_of,
    recognise_captured,
    segments_of,
    session_of,
)
from cachecraft_rag.server.documents import owner_of
from cachecraft_rag.server.wire import Message
from cachecraft_rag.serving.request import Request
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store.background_writer import log_mistake
from cachecraft_rag.types.digests import digest, digest_of_tokens
from cachecraft_rag.types.prompts import Prompt, Segment, token_array
from cachecraft_rag.vllm.calls import EngineClient, RequestOutput
from cachecraft_rag.vllm.messages import FIELD, Ask
from cachecraft_rag.vllm.records import RecordingClient, Records, RequestParams, RequestRecord
from cachecraft_rag.vllm.server.message_places import (
    Searched,
    TokenOffsets,
    locate_messages,
)
from cachecraft_rag.vllm.server.server_engine import ServerEngine

T = TypeVar("T")
Notes = Callable[[], Mapping[str, Candidate]]

logger = logging.getLogger("cachecraft_rag.vllm")

_LEFT_TO_VLLM = "A prompt without documents is left to vLLM"

# tokens per block of `ServedPrompts`; fewer than are always computed at the end of the last message
_BLOCK = 16
_MOST_BLOCKS = 1 << 17  # number of blocks that `ServedPrompts` remembers
# A prompt is served from chunk-caches only if they hold so many of its tokens, and so large a fraction of it.
_LEAST_REUSED = 128
_LEAST_SHARE = 1 / 8
_THREADS = 4

ROLES = ("user", "tool", "system", "prompt")
RESULTS = ("stored", "noted", "nothing")


@dataclass(frozen=True)
class Origin:
    """Origin of a request: its session, its `cache_salt` and its reuse settings.

    quality  reason for the recompute ratio, if a quality target chose it; else ""
    tenant   its tenant's namespace; "": the server's own
    """

    session: str | None
    salt: str
    config: ReuseConfig
    quality: str = ""
    tenant: str = ""

    @property
    def owner(self) -> str | None:
        """Session that owns the request's passages; without one the salt counts as such. None: its tenant's."""
        return owner_of(self.session, self.salt)


@dataclass(frozen=True)
class Prepared:
    """A prompt with found segments, or with a remark.

    ask     request to fill it from chunk-caches; None: vLLM computes it
    notes   returns `candidates_of`, the candidates to capture if their text was seen before, {} if the settings capture
            nothing; called after the answer so as not to delay it
    unused  segment id → reason why its stored chunk-cache is not used, if vLLM computes the prompt
    remark  note to the client; "" if there is nothing to say
    """

    request: Request
    ask: Ask | None
    notes: Notes
    unused: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""


class _LaidOut(NamedTuple):
    """A prompt in segments, as `PlainPrompts` found them.

    prompt  None if no segment was found
    notes   see `Prepared`
    reused  number of tokens of the prompt that are stored
    moved   True if stored segments have moved since their capture
    stored  ids of the segments that are stored
    """

    prompt: Prompt | None
    notes: Notes
    reused: int = 0
    moved: bool = False
    stored: frozenset[str] = frozenset()


class ServedPrompts:
    """The prompts whose blocks vLLM's prefix cache is likely to hold: the latest ones that fit. Thread-safe.

    Args:
        tokens: capacity of the prefix cache in tokens; 0 if it is off.
    """

    def __init__(self, tokens: int) -> None:
        self._most = min(tokens // _BLOCK, _MOST_BLOCKS)
        # chained digests, as vLLM's own
        self._blocks: OrderedDict[bytes, Ask | None] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, ids: Sequence[int], origin: Origin, ask: Ask | None) -> None:
        """Note a prompt that was served; the oldest blocks that do not fit the prefix cache are forgotten.

        A block has 16 tokens; tokens after the last whole block are not noted. If the prompt was served from
        chunk-caches, by `ask`, only blocks that end after all of its chunks are noted: only these distinguish it from
        other prompts.
        """
        least = 0 if ask is None else ask.prompt.bounds[-2]
        with self._lock:
            for stop, block in _chain(ids, origin):
                if stop >= least:
                    self._blocks[block] = ask
                    self._blocks.move_to_end(block)
            while len(self._blocks) > self._most:
                self._blocks.popitem(last=False)

    def longest(self, ids: Sequence[int], origin: Origin) -> tuple[int, Ask | None]:
        """Return the tokens of the longest prefix that was served, a multiple of 16, and the ask that filled it.

        (0, None) without one; the ask is None too if vLLM computed the prefix without chunk-caches. Only prompts noted
        with an equal `origin`, except for its `quality`, count; of one that was served from chunk-caches, only prefixes
        that hold all of its chunks. Raises OverflowError for a token id of more than 63 bits.
        """
        length = 0
        ask: Ask | None = None
        with self._lock:
            for stop, block in _chain(ids, origin):
                if block in self._blocks:
                    length = stop
                    ask = self._blocks[block]
        return length, ask


def _chain(ids: Sequence[int], origin: Origin) -> Iterator[tuple[int, bytes]]:
    """Yield the end of each whole block, and a digest of all tokens up to it."""
    chained = hashlib.blake2b(
        repr((origin.tenant, origin.session, origin.salt, origin.config)).encode(), digest_size=16
    )
    packed = array("q", ids).tobytes()
    width = 8 * _BLOCK
    for end in range(width, len(packed) + 1, width):
        chained.update(packed[end - width : end])
        yield end // 8, chained.digest()


# finds the parts to search in vLLM's prompt
Locate = Callable[[Mapping[str, Any]], Searched]


class PlainPrompts:
    """Prompts without documents of one API server. Only `prepare`, `locate` and `left_to_vllm` may run in threads.

    Args:
        cached_tokens: capacity of vLLM's prefix cache in tokens; 0 if it is off.
    """

    def __init__(self, engine: ServerEngine, records: Records, *, cached_tokens: int) -> None:
        self._engine = engine
        self.records = records
        self._served = ServedPrompts(cached_tokens)
        self._searched = Counter(
            "cachecraft_searched_messages",
            "Messages of prompts without documents that were searched for passages, by role and result",
            ["role", "result"],
            registry=engine.request_counts.registry,
        )
        for role, result in product(ROLES, RESULTS):
            self._searched.labels(role, result)
        self._threads = ThreadPoolExecutor(_THREADS, "cachecraft-found-texts")
        self._offsets = TokenOffsets(engine.decoder.tokenizer)

    def locate(
        self, prompt: Mapping[str, Any], messages: Sequence[Message], *, search_system: bool
    ) -> Searched:
        """Return the parts of vLLM's prompt to search, see `locate_messages`."""
        text = self._offsets.prompt_text(prompt)
        return locate_messages(text, messages, search_system=search_system)

    def prepare(
        self, ids: Sequence[int], locate: Callable[[], Searched], origin: Origin
    ) -> Prepared | None:
        """Find segments in a prompt, and decide how it is served; None if there is nothing to reuse, note or say.

        The prompt is served from chunk-caches (`Prepared.ask`) if they hold at least 128 of its tokens, an eighth of
        it, and more than vLLM's prefix cache has of it from a prompt without chunk-caches. If the prefix cache has as
        much of it from an earlier prompt that was served from chunk-caches, the request may begin with that prompt's
        chunks instead. A prompt that is shorter than `min_prompt_tokens` is served in the second way only; otherwise it
        is neither searched nor looked up.

        Waits for the catalog and for a remote. If the catalog cannot be read, vLLM computes the prompt. `locate` is
        called at most once, and returns the parts of the prompt to search.
        """
        started = time.perf_counter()
        cached, before = self._served.longest(ids, origin)
        measured = self._engine.min_prompt_tokens
        is_short = not origin.config.for_prompt(len(ids), measured=measured).reuse
        too_short = f"it has {len(ids)} tokens, too few to reuse any (min_prompt_tokens)"
        if is_short and before is None:
            if len(ids) < MIN_TEXT_TOKENS:
                return None
            return self.left_to_vllm(ids, origin, too_short)

        searched = locate()
        prompt, notes, reused, moved, stored = self._laid_out(ids, searched, origin)
        ask: Ask | None = None
        if before is not None and cached >= reused and (moved or 2 * reused < cached):
            ask = _continued(before, ids)
            prompt = ask.prompt
        elif prompt is None and not searched.remark:
            return None
        elif (
            prompt is not None
            and not is_short
            and (before is not None or cached < reused)
            and reused >= max(_LEAST_REUSED, _LEAST_SHARE * len(ids))
        ):
            # The salt keeps exactly filled blocks apart from approximate ones of the same prompt.
            salt = origin.salt if moved else f"exact {origin.salt}"
            # found text is captured by later requests, see `notes`
            config = replace(origin.config, capture=False)
            session = session_of(prompt, origin.owner)
            ask = Ask(prompt, config, session, client_salt=salt, namespace=origin.tenant)
        request = self._request(prompt or Prompt((_text_of(ids),)), origin, started)
        if ask is not None:
            ask = replace(ask, name=request.request_id)
            return Prepared(request, ask, notes, remark=searched.remark)
        if is_short:
            cause = too_short
        elif cached >= reused:
            cause = "its own prefix cache has more of it"
        else:
            cause = f"chunk-caches have {reused} of {len(ids)} tokens, too few to gain time"
        remark = searched.remark or f"left to vLLM: {cause}"
        return Prepared(request, None, notes, dict.fromkeys(stored, cause), remark)

    def left_to_vllm(self, ids: Sequence[int], origin: Origin, cause: str) -> Prepared:
        """Return a prompt that is not searched, and that vLLM computes; the note to the client says why."""
        request = self._request(Prompt((_text_of(ids),)), origin, time.perf_counter())
        return Prepared(request, None, dict, remark=f"left to vLLM: {cause}")

    def _request(self, prompt: Prompt, origin: Origin, started: float) -> Request:
        """Return a request that began at `started`, with the settings of its origin."""
        return Request(
            prompt,
            origin.config,
            SamplingParams(),
            origin.session,
            started,
            quality=origin.quality,
            namespace=origin.tenant or self._engine.namespace,
        )

    def _laid_out(self, ids: Sequence[int], searched: Searched, origin: Origin) -> _LaidOut:
        """Divide a prompt into segments, and look them up."""
        engine = self._engine.for_tenant(origin.tenant) if origin.tenant else self._engine
        owner = origin.owner
        head = tuple(ids[: max(1, min((text.start for text in searched.texts), default=0))])
        look_up = partial(
            engine.store.marked_texts, engine.namespace, engine.decoder.fingerprint, session=owner
        )
        pieces = _pieces(ids, searched, len(head))
        recognise = partial(recognise_captured, look_up=look_up)
        kinds = engine.prompts.kinds
        tail = segments_of(pieces, kinds, recognise, private=owner is not None, repeated=True)
        if tail is None:
            self._count(searched, {}, len(head))
            return _LaidOut(None, dict)
        system = Segment(
            "system",
            digest("system", " ".join(map(str, head))),
            token_array(head),
            private=True,  # an application that marks nothing may put a user's text there
        )
        prompt = Prompt((system, *tail[:-1], replace(tail[-1], closing=len(pieces[-1].token_ids))))
        session = session_of(prompt, owner)
        lookup = engine.look_up(
            [segment for segment in prompt.segments if segment.kind != "question"], session=session
        )
        plan = make_plan(prompt, lookup.variants, origin.config, refused=lookup.refused)
        stored = {
            start: planned.variant is not None
            for start, segment, planned in zip(prompt.bounds, prompt.segments, plan, strict=False)
            if segment.found
        }
        self._count(searched, stored, len(head))
        scope = (engine.namespace, engine.decoder.fingerprint)
        notes: Notes = dict
        if origin.config.capture and engine.new_variants.config.when != "off":
            notes = partial(
                candidates_of,
                prompt,
                plan,
                session,
                scope,
                stand_in=engine.prompts.stand_in,
                shared=engine.prompts.system,
            )
        return _LaidOut(
            prompt,
            notes,
            reused=sum(planned.variant.tokens for planned in plan if planned.variant is not None),
            moved=any(planned.to_fix for planned in plan),
            stored=frozenset(
                segment.segment_id
                for segment, planned in zip(prompt.segments, plan, strict=True)
                if planned.variant is not None
            ),
        )

    def _count(self, searched: Searched, stored: Mapping[int, bool], start: int) -> None:
        """Count the searched messages, given start of each found segment → True if it is stored."""
        for text, role in zip(searched.texts, searched.roles, strict=True):
            within = [
                is_stored
                for place, is_stored in stored.items()
                if max(start, text.start) <= place < text.stop
            ]
            result = "stored" if any(within) else "noted" if within else "nothing"
            self._searched.labels(role, result).inc()

    def served(self, ids: Sequence[int], origin: Origin, prepared: Prepared | None) -> None:
        """Note a prompt whose blocks are now in vLLM's prefix cache; `prepared` is the result of `prepare`, or None."""
        self._served.note(ids, origin, None if prepared is None else prepared.ask)

    def asking(self, ask: Ask) -> tuple[dict[str, object], str]:
        """Return the `kv_transfer_params` of a request, which hold the signed message, and its salt, 32 hex digits."""
        return {FIELD: self._engine.transfer(ask)[FIELD]}, ask.cache_salt(self._engine.namespace)

    def record(self, prepared: Prepared) -> RequestRecord:
        """Return a new record of a request; chance may select its answer for an audit if chunk-caches serve it."""
        name = prepared.request.request_id
        return RequestRecord(
            prepared.request,
            self._engine.decoder.layout.layers,
            name,
            left_to_vllm=prepared.ask is None,
            unused=prepared.unused,
            remark=prepared.remark,
            # an answer of vLLM alone is that of full prefill
            predicted=self._engine.predicted_answer(prepared.request) if prepared.ask else None,
        )

    async def aside(self, act: Callable[[], T]) -> T | None:
        """Return the result of a blocking function that one of four threads runs.

        Returns None if it raises CacheCraftError, OSError, RuntimeError or OverflowError (for a token id of more than
        63 bits), which is logged: vLLM then serves the request without chunk-caches, or refuses it.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, act)
        except (CacheCraftError, OSError, RuntimeError, OverflowError):
            logger.exception(_LEFT_TO_VLLM)
            return None

    def note(self, notes: Notes) -> None:
        """Count a prompt's texts as seen in the store, and have those that were seen before captured (`IdleVariants`).

        To be called after the answer, with `Prepared.notes`. A thread does the work, and failures are only logged.
        """
        self._threads.submit(self._note, notes).add_done_callback(log_mistake)

    def _note(self, notes: Notes) -> None:
        candidates = notes()
        for name in self._engine.store.seen_texts(list(candidates)) if candidates else ():
            self._engine.new_variants.answered(0, candidates[name])


def _pieces(ids: Sequence[int], searched: Searched, start: int) -> list[PromptPiece]:
    """Divide the tokens from `start` on into pieces; the texts become pieces that are searched.

    The piece of a text that is not in the prompt, such as a system message that the template leaves out, is empty.

    >>> pieces = _pieces([5, 6, 7, 8, 9], Searched((range(5, 5), range(3, 4), range(1, 2))), 1)
    >>> [tuple(piece) for piece in pieces]
    [((), False), ((6,), True), ((7,), False), ((8,), True), ((9,), False)]
    """
    pieces: list[PromptPiece] = []
    for text in sorted(filter(len, searched.texts), key=attrgetter("start")):
        begin = max(start, text.start)
        stop = max(start, text.stop)
        pieces.append(PromptPiece(tuple(ids[start:begin]), is_searched=False))
        pieces.append(PromptPiece(tuple(ids[begin:stop]), is_searched=True))
        start = stop
    # An empty piece stands for the missing question: otherwise the last tokens of a passage would count as a question.
    if not searched.ends_with_question:
        pieces.append(PromptPiece((), is_searched=True))
    return [*pieces, PromptPiece(tuple(ids[start:]), is_searched=False)]


def _text_of(ids: Sequence[int], start: int = 0) -> Segment:
    """Return the tokens from `start` on as a segment that is computed."""
    rest = token_array(ids[start:])
    name = digest("between", str(start), digest_of_tokens(rest))
    return Segment("question", name, rest, private=True)


def _continued(before: Ask, ids: Sequence[int]) -> Ask:
    """Return a request that begins with the chunks of an earlier one, whose blocks vLLM's prefix cache has."""
    question = _text_of(ids, before.prompt.bounds[-2])
    return replace(before, prompt=Prompt((*before.prompt.segments[:-1], question)))


class SearchingClient:
    """vLLM's engine client for the handler of one request without documents.

    Each prompt is searched on its way, and recorded if it has segments or a remark.
    """

    def __init__(
        self, client: EngineClient, prompts: PlainPrompts, origin: Origin, locate: Locate
    ) -> None:
        self._client = client
        self._prompts = prompts
        self._origin = origin
        self._locate = locate

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    async def generate(
        self, prompt: Mapping[str, Any], params: RequestParams, request_id: str, **options: object
    ) -> AsyncGenerator[RequestOutput]:
        """Yield outputs as vLLM's client does; closing the generator aborts the request.

        Before the first output, the prompt is searched. If segments are found, the request is recorded, its last output
        carries its statistics, and its `Prepared.notes` are noted once it has ended. If it is served from chunk-caches,
        `params.extra_args` gets the message about them. A prompt with images, sound or videos is recorded, and its last
        output says that vLLM computes it. It says so too for requests for several answers, for log-probabilities of the
        prompt, with a LoRA adapter, or below `min_prompt_tokens`, if their prompts are long enough to be searched.
        Embeddings and requests with other `kv_transfer_params` are passed on unchanged.

        In the outputs of a request that is served from chunk-caches, `num_cached_tokens` is the number of reused
        tokens, None before the report. For an audit, `params.logprobs` becomes 16, and the outputs hide them.
        """
        prompts = self._prompts
        client: EngineClient | RecordingClient = self._client
        prepared: Prepared | None = None
        ids: Sequence[int] = []
        if _has_tokens(prompt) and _is_alone(params):
            cause = _left_because(prompt, params, options)
            if not cause:
                ids = prompt["prompt_token_ids"]
            prepared = await prompts.aside(partial(self._prepare, prompt, cause))
        if prepared is not None:
            client = RecordingClient(self._client, prompts.record(prepared), prompts.records)
            if prepared.ask is not None:
                transfer, salt = prompts.asking(prepared.ask)
                params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": transfer}
                prompt = {**prompt, "cache_salt": salt}
        try:
            async with aclosing(client.generate(prompt, params, request_id, **options)) as outputs:
                async for output in outputs:
                    if output.finished:
                        prompts.served(ids, self._origin, prepared)
                    yield output
        finally:
            if prepared is not None:
                prompts.note(prepared.notes)

    def _prepare(self, prompt: Mapping[str, Any], cause: str) -> Prepared | None:
        """Search a prompt, or with a cause leave it to vLLM; None if there is nothing to say."""
        ids = prompt["prompt_token_ids"]
        if not cause:
            return self._prompts.prepare(ids, partial(self._locate, prompt), self._origin)
        if len(ids) < MIN_TEXT_TOKENS and not _holds_media(prompt):
            return None
        return self._prompts.left_to_vllm(ids, self._origin, cause)


def _has_tokens(prompt: object) -> bool:
    return isinstance(prompt, Mapping) and prompt.get("type") in ("token", "multimodal")


def _holds_media(prompt: Mapping[str, object]) -> bool:
    return prompt["type"] == "multimodal"


def _is_alone(params: RequestParams) -> bool:
    """Return True for a request that generates text and is no other connector's, whose parameters are its own."""
    return hasattr(params, "n") and not (params.extra_args or {}).get("kv_transfer_params")


def _left_because(
    prompt: Mapping[str, Any], params: RequestParams, options: Mapping[str, object]
) -> str:
    """Return why vLLM computes a request, whatever its text; "" if it may be served from chunk-caches."""
    if _holds_media(prompt):
        return "it holds images, sound or videos"
    if getattr(params, "n", 1) > 1:
        return "it asks for several answers (n)"
    if params.prompt_logprobs is not None:
        return "it asks for log-probabilities of the prompt, so vLLM computes all of it"
    if options.get("lora_request"):
        return "it uses a LoRA adapter, with which only documents are reused"
    return ""
