"""Render an untrusted chat template: the program of a separate process with limits of time and memory.

Reads JSON from standard input and writes JSON to standard output: {"text": …} or {"error": …}. The template language is
that of transformers (`chat_template_utils`). Imports only Jinja and the standard library, because it starts often.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any

MAX_SECONDS = 5  # of CPU time
MAX_MEMORY = 1 << 30  # bytes of address space
MAX_TEXT = 4 << 20  # characters of the rendered prompt


def limit_resources() -> None:
    """Limit this process to 5 s of CPU time and 1 GiB of memory, or less if the system allows less; not on Windows."""
    try:
        import resource
    except ImportError:  # Windows: the caller's timeout remains
        return
    for kind, most in ((resource.RLIMIT_CPU, MAX_SECONDS), (resource.RLIMIT_AS, MAX_MEMORY)):
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))


def render(template: str, variables: dict[str, object]) -> str:
    """Render a chat template as transformers does; return the text of the prompt.

    The template runs in jinja2's sandbox, but in this process: without `limit_resources` it may run for ever.
    Exceptions of its expressions pass.

    Args:
        template: the template; untrusted.
        variables: its variables by name, such as "messages"; JSON values.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlocks(Extension):
        """`{% generation %}` marks what a model wrote; only its content is rendered."""

        tags = {"generation"}  # noqa: RUF012  # Jinja's own form

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlocks, loopcontrols],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template).render(**variables)


def main() -> None:
    """Render the template of standard input, and write {"text": …} or {"error": …} to standard output, as JSON.

    The input is a JSON object with "template" and "variables". An exception of the template, or a prompt of more than 4
    million characters, becomes the "error", in at most 500 characters. Out of memory or of CPU time
    (`limit_resources`), the process fails; a template that only waits needs the caller's timeout, and on Windows any
    does.
    """
    limit_resources()
    given = json.load(sys.stdin)
    try:
        text = render(given["template"], given["variables"])
        if len(text) > MAX_TEXT:
            raise ValueError(f"the prompt has more than {MAX_TEXT} characters")
        reply = {"text": text}
    except MemoryError:  # this process ends with an error, and the caller says what to do
        raise
    except Exception as error:  # noqa: BLE001  # expressions of a template may raise anything; the caller raises it
        reply = {"error": f"{type(error).__name__}: {error}"[:500]}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
