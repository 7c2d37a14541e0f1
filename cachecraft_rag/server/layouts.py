"""Prompt builders of a server: for its own instruction and tools, and for those of its clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import lru_cache, partial

from cachecraft_rag.engine.base import AnswerEngine
from cachecraft_rag.prompt.builder import PromptBuilder
from cachecraft_rag.prompt.tools import Tool

_KEPT_BUILDERS = 32


class Layouts:
    """Prompt builders by instruction and tools; the 32 used last are kept. Thread-safe.

    Args:
        engine: its builder lays out requests with the server's own instruction and without tools.
        system: the server's instruction.
        best_last: put the best chunk last, directly before the question.
        search_system: search the instruction of `bare` prompts for captured texts.
    """

    def __init__(
        self, engine: AnswerEngine, *, system: str, best_last: bool, search_system: bool = False
    ) -> None:
        self._prompts = engine.prompts
        self._system = system
        self._new_builder = partial(
            PromptBuilder,
            engine.decoder.tokenizer,
            context_length=engine.decoder.context_length,
            best_last=best_last,
            search_system=search_system,
        )
        self._kept = lru_cache(_KEPT_BUILDERS)(self._made)
        self._making = threading.Lock()

    def of(
        self, system: str | None, tools: Sequence[Tool], *, private: bool, bare: bool = False
    ) -> PromptBuilder:
        """Return the builder for the instruction and the tools of a request.

        Args:
            system: instruction of the request; None: the server's, or with `bare` none.
            tools: tools of the request.
            private: True if instruction or tools hold one user's text; implied if the server's instruction is private.
            bare: write no words around the texts, for requests without documents.
        """
        text = ("" if bare else self._system) if system is None else system
        private = private or self._prompts.system.private
        is_own = text == self._system and private == self._prompts.system.private
        if is_own and not tools and not bare:
            return self._prompts
        # the tokenizer is not thread-safe while a builder copies it
        with self._making:
            return self._kept(text, json.dumps(tools), private, bare)

    def _made(self, system: str, tools: str, private: bool, bare: bool) -> PromptBuilder:
        made = partial(self._new_builder, system=system, tools=json.loads(tools), bare=bare)
        checked = made(private_system=True)  # refuses control tokens of a client
        return checked if private else made(private_system=False)
