"""From a request's body to an answer of the engine: the prompt's layout, the tools, and the statistics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import CacheCraftError, ConfigError
from cachecraft_rag.planning.candidates import Owner
from cachecraft_rag.prompt.tools import CallReader, ToolCall
from cachecraft_rag.prompt.unmarked import Recognise
from cachecraft_rag.server.documents import (
    Asked,
    ChatRequest,
    PlainRequest,
    owner_of,
    plain_config,
    uncaptured_note,
)
from cachecraft_rag.server.layouts import Layouts
from cachecraft_rag.server.local.fields import (
    Body,
    ToolUse,
    answer_schema,
    chat_fields,
    completion_fields,
    response_as_chat,
    sampling_of,
)
from cachecraft_rag.server.settings import EndpointSettings
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.prompts import Prompt

_UNOWNED = "computed in full: its instruction or its tools are private (private_system), and it has no session"
_FINISH = {"end": "stop", "stop": "stop", "length": "length"}


@dataclass(frozen=True)
class Caller:
    """Caller of a request: the engine of its tenant, and its session."""

    engine: Engine
    session: str | None

    @property
    def owner(self) -> Owner:
        """Tenant and session, which may see the statistics of the request."""
        return self.engine.namespace, self.session


@dataclass
class Answer:
    """An answer under way. Iterate over `pieces` once, in one task; `begin` before it is optional.

    prefix   beginning of its id, such as "chatcmpl-"
    calls    finds the calls of tools in the answer; None without tools
    single   True if only one call may be made
    note     remark for the client; "" if there is nothing to say
    owner    tenant and session that may see its statistics
    ended    called once, when the answer has ended in any way
    created  time of the request, in seconds since 1970
    name     the id that clients see
    """

    prefix: str
    generation: Generation
    calls: CallReader | None = None
    single: bool = False
    note: str = ""
    owner: Owner = ("", None)
    ended: Callable[[Self], object] = lambda _: None
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(init=False)
    _first: list[str] = field(default_factory=list)
    _sent_tokens: int = 0
    _is_closed: bool = False

    def __post_init__(self) -> None:
        """Keep the id: every event of a stream has it, and statistics are computed at each access."""
        self.name = f"{self.prefix}{self.generation.stats.request_id}"

    async def begin(self) -> None:
        """Wait for the first piece: an error before it ends the answer, is raised, and can still change the status."""
        try:
            self._first = [await anext(self.generation)]
        except StopAsyncIteration:
            pass
        except BaseException:  # a client that leaves too, which cancels this: the answer ends
            self.close()
            raise

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text that readers may see, piece by piece ("" during a call of a tool). Ends the answer."""
        try:
            for piece in self._first:
                yield self._visible(piece)
            async for piece in self.generation:
                yield self._visible(piece)
        finally:
            self.close()

    def close(self) -> None:
        """End the answer; its captures are kept. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self.generation.close()
        self.ended(self)

    def rest(self) -> tuple[str, list[ToolCall]]:
        """Return (text that was held back as a possible call but is none, calls), of an answer that has ended."""
        if self.calls is None:
            return "", []
        text, calls = self.calls.finish()
        return text, calls[:1] if self.single else calls

    def new_tokens(self) -> list[int]:
        """Return the token ids that were drawn since the last call."""
        tokens = self.generation.tokens[self._sent_tokens :]
        self._sent_tokens += len(tokens)
        return list(tokens)

    def finish(self) -> str:
        """Return "length" once the answer reached its longest length, else "stop", also before its end or for calls."""
        return _FINISH.get(str(self.generation.stats.finish), "stop")

    def statistics(self) -> dict[str, object]:
        """Return "stats" and "report" (of the segments) so far, "note" and "refused", as the server over vLLM.

        "note" is None if there is nothing to say, and "refused" always; "finish" in "stats" is None before the end.
        """
        return {
            "stats": self.generation.stats.as_dict(),
            "report": self.generation.report(),
            "refused": None,
            "note": self.note or None,
        }

    def _visible(self, piece: str) -> str:
        return piece if self.calls is None else self.calls.push(piece)


class Answerer:
    """Lays out the prompts of requests, and asks the engine. Its methods block; thread-safe.

    They take a request's JSON object, and return an answer that has not started. They count refused requests.

    Args:
        engine: lays out prompts and counts refusals; the engine of the `Caller`, its tenant's, answers.
        system: the engine's instruction.
        best_last: put the best document last, directly before the question.
        defaults: sampling parameters for what a request leaves open.
        ended: called once with each answer that has ended.
    """

    def __init__(
        self,
        engine: Engine,
        settings: EndpointSettings,
        *,
        system: str,
        best_last: bool,
        defaults: SamplingParams,
        ended: Callable[[Answer], object],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._defaults = defaults
        self._ended = ended
        self._layouts = Layouts(
            engine, system=system, best_last=best_last, search_system=settings.search_system
        )

    def chat(self, body: Body, caller: Caller, *, prefix: str = "chatcmpl-") -> Answer:
        """Return the answer to a chat request, with an id that begins with `prefix`.

        With `documents`, even [], the prompt is the engine's own: instruction, documents, earlier turns, question.
        Without, it is the model's own chat template, in which captured passages are found unless the server's or the
        request's `plain_prompts` is "off". A prompt that begins with private text and has no session is computed
        without chunk-caches.
        """
        started = time.perf_counter()
        with self._counted():
            fields = chat_fields(body)
            self._check_end_tokens(body.get("stop_token_ids"))
            asked = self._asked(fields)
            use = ToolUse.of(
                asked.tools, fields.tool_choice, parallel=body.get("parallel_tool_calls")
            )
            schema = answer_schema(body.get("response_format"))
            if schema is not None and use.offered:
                raise ConfigError(
                    'response_format cannot be used together with tools: leave one out, or set tool_choice to "none"'
                )
            has_documents = body.get("documents") is not None
            builder = self._layouts.of(
                asked.system, use.offered, private=asked.private_system, bare=not has_documents
            )
            # in unmarked text, a client's salt counts as a session
            owner = caller.session if has_documents else owner_of(caller.session, asked.client_salt)
            prompt = builder.build(
                asked.question,
                asked.chunks,
                history=asked.history,
                reserve=asked.reserve,
                recognise=self._recogniser(fields, caller.engine, owner),
                private=owner is not None,
            )
            max_tokens = fields.max_completion_tokens
            sampling = self._sampling(
                body,
                prompt,
                max_tokens=fields.max_tokens if max_tokens is None else max_tokens,
                schema=use.schema(builder.calls) or schema if use.offered else schema,
            )
            config = asked.config or self._engine.config
            is_unowned = _is_unowned(prompt, owner)
            if is_unowned:
                config = replace(config, reuse=False, capture=False)
            generation = caller.engine.generate(
                prompt, session=owner, sampling=sampling, config=config, started=started
            )
        return Answer(
            prefix,
            generation,
            calls=use.reader(builder.calls) if use.offered else None,
            single=use.single,
            note=_UNOWNED if is_unowned else uncaptured_note(asked.config, self._engine.config),
            owner=caller.owner,
            ended=self._ended,
        )

    def response(self, body: Body, caller: Caller) -> Answer:
        """Return the answer to a body of `/v1/responses`, as `chat` would to the same messages."""
        with self._counted():
            chat = response_as_chat(body)
        return self.chat(chat, caller, prefix="resp_")

    def completion(self, body: Body, caller: Caller) -> Answer:
        """Return the completion of a text without a chat template; captured passages are found in it as in `chat`."""
        started = time.perf_counter()
        with self._counted():
            fields = completion_fields(body)
            asked = self._asked(fields)
            owner = owner_of(caller.session, asked.client_salt)
            prompt = self._engine.prompts.build_text(
                asked.question,
                reserve=asked.reserve,
                recognise=self._recogniser(fields, caller.engine, owner),
                private=owner is not None,
            )
            sampling = self._sampling(body, prompt, max_tokens=fields.max_tokens)
            generation = caller.engine.generate(
                prompt, session=owner, sampling=sampling, config=asked.config, started=started
            )
        note = uncaptured_note(asked.config, self._engine.config)
        return Answer("cmpl-", generation, note=note, owner=caller.owner, ended=self._ended)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request that the block refuses."""
        try:
            yield
        except CacheCraftError:
            self._engine.request_counts.refuse()
            raise

    def _asked(self, fields: ChatRequest) -> Asked:
        engine = self._engine
        return Asked.read(
            fields,
            engine.config,
            context_length=engine.decoder.context_length,
            allowed=self._settings.client_settings,
        )

    def _recogniser(
        self, fields: PlainRequest, engine: Engine, owner: str | None
    ) -> Recognise | None:
        """Return the finder of captured texts in unmarked text; None if the request or the server turns it off."""
        if self._settings.plain_prompts == "off":
            return None
        config = plain_config(fields, engine.config, self._settings.client_settings)
        return None if config is None else engine.recogniser(owner)

    def _sampling(
        self,
        body: Body,
        prompt: Prompt,
        *,
        max_tokens: int | None,
        schema: Mapping[str, Any] | None = None,
    ) -> SamplingParams:
        room = self._engine.decoder.context_length - prompt.bounds[-1]
        return sampling_of(body, self._defaults, max_tokens=max_tokens, room=room, schema=schema)

    def _check_end_tokens(self, given: object) -> None:
        if given is None:
            return
        known = self._engine.decoder.end_tokens
        tokens = given if isinstance(given, list) else [None]
        if not all(isinstance(token, int) and token in known for token in tokens):
            raise ConfigError(
                f"stop_token_ids: the model's own, {sorted(known)}, end an answer; use stop for texts"
            )


def _is_unowned(prompt: Prompt, session: str | None) -> bool:
    """Return True if a prompt begins with private text that no session owns; found text names a session."""
    is_found = any(segment.found for segment in prompt.segments)
    return prompt.segments[0].private and session is None and not is_found
