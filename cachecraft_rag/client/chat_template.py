"""A tokenizer that a server sent: its chat template is rendered in a separate process with limits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from cachecraft_rag.checks import shown
from cachecraft_rag.client import template_process
from cachecraft_rag.errors import ServerError

_TIMEOUT_S = 20.0  # of the process, with its start; its CPU time has a separate limit
_KEPT_RENDERINGS = 64


class ServedTokenizer:
    """A transformers tokenizer whose chat template is untrusted.

    Templates are programs: nested loops can run for ever, and doubling a text fills the memory. Rejected: rendering in
    this process with a count of the steps, because a single filter can do unbounded work.

    Args:
        tokenizer: the tokenizer; everything but `apply_chat_template` is taken from it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # prompts are rendered with marks in place of texts
        self._rendered = lru_cache(_KEPT_RENDERINGS)(_render)
        self._failure = ""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "_tokenizer":  # while it is copied, or not made yet
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments: object, **options: object) -> object:
        """Tokenise as the tokenizer does; its result and its exceptions pass unchanged."""
        return self._tokenizer(*arguments, **options)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """Render messages as transformers does, in a separate process, and return the prompt's text.

        The last 64 results are kept. After a ServerError nothing is rendered any more: every call raises it again.

        Args:
            messages: turns such as {"role": "user", "content": "…"}; JSON values.
            tokenize: must be False.
            add_generation_prompt: end the text with the beginning of an answer.
            tools: tools that the template writes, in OpenAI's form; None: no tools.

        Raises:
            ServerError: rendering takes more than 5 s of CPU time, 20 s in all or 1 GiB, or its process fails.
            TemplateError: of jinja2; the template refuses the messages, is invalid, makes more than 4 million
                characters, or an expression in it raises.
            ValueError: the tokenizer has no chat template.
        """
        assert not tokenize, "the prompt builder tokenises segments separately"
        variables = {
            **self._tokenizer.special_tokens_map,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        given = {"template": self._tokenizer.get_chat_template(None, tools), "variables": variables}
        if self._failure:
            raise ServerError(self._failure)
        try:
            return self._rendered(json.dumps(given))
        except ServerError as error:
            self._failure = str(error)
            raise


def _render(given: str) -> str:
    from jinja2.exceptions import TemplateError

    command = [sys.executable, "-P", template_process.__file__]
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        reply = json.loads(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError):
        reply = None
    if reply is None:
        raise ServerError(
            "the chat template that the server sent takes too much time or memory; check the model that it serves, and "
            "connect again"
        )
    if "error" in reply:
        raise TemplateError(shown(reply["error"]))
    return str(reply["text"])
