"""The last line of a server's start: it is ready, and a first request that works."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
from collections.abc import Sequence
from typing import Protocol

from cachecraft_rag.server.administration import CLOSED
from cachecraft_rag.server.settings import EndpointSettings

logger = logging.getLogger("cachecraft_rag.server")

_RETRY_S = 0.2
# hosts on which a server listens to all addresses → one of them
_ALL_ADDRESSES = {None: "127.0.0.1", "": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


class ServerArguments(Protocol):
    """Arguments of vLLM's server, as far as they say how to reach it."""

    host: str | None
    port: int
    uds: str | None
    ssl_certfile: str | None
    api_key: Sequence[str] | None
    served_model_name: Sequence[str] | str | None
    model: str


def first_request(
    args: ServerArguments, *, needs_key: bool = False, tenant_header: str | None = None
) -> str:
    """Return a `curl` command for a shell that asks this server a question with a document.

    `needs_key` is True if the server asks for a key that `args` do not have. Key and tenant are placeholders.
    """
    names = args.served_model_name or args.model
    body = {
        "model": names if isinstance(names, str) else names[0],
        "messages": [{"role": "user", "content": "How often should I descale it?"}],
        "documents": [{"text": "Descale the coffee maker every month."}],
        "max_tokens": 64,
    }
    fields = ",\n  ".join(
        f"{json.dumps(name)}: {json.dumps(value)}" for name, value in body.items()
    )
    headers = ["Content-Type: application/json"]
    if args.api_key or needs_key:
        headers.append("Authorization: Bearer YOUR-KEY")
    if tenant_header:
        headers.append(f"{tenant_header}: YOUR-TENANT")
    options = [f"-H {shlex.quote(header)}" for header in headers]
    if args.uds:
        options.insert(0, f"--unix-socket {shlex.quote(args.uds)}")
    options.append("-d " + shlex.quote("{\n  " + fields + "}"))
    return " \\\n  ".join([f"curl {_address(args)}/v1/chat/completions", *options])


def ready_text(
    args: ServerArguments, settings: EndpointSettings, *, needs_key: bool = False, note: str = ""
) -> str:
    """Return the text for a ready server: `note`, another note if no client may prime, and a first request."""
    closed = CLOSED if settings.admin_keys == () else ""
    notes = "".join(f" Note: {text}." for text in (note, closed) if text)
    request = first_request(args, needs_key=needs_key, tenant_header=settings.tenant_header)
    return f"Ready.{notes} A question with a document, for another terminal:\n{request}"


async def announce(
    args: ServerArguments, settings: EndpointSettings, *, needs_key: bool = False, note: str = ""
) -> None:
    """Wait without limit until the server accepts connections, then log `ready_text`."""
    while not await _accepts_connections(args):
        await asyncio.sleep(_RETRY_S)
    logger.info("%s", ready_text(args, settings, needs_key=needs_key, note=note))


def _address(args: ServerArguments) -> str:
    if args.uds:
        return "http://localhost"
    host = _host(args)
    scheme = "https" if args.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{args.port}" if ":" in host else f"{scheme}://{host}:{args.port}"


def _host(args: ServerArguments) -> str:
    return _ALL_ADDRESSES.get(args.host) or str(args.host)


async def _accepts_connections(args: ServerArguments) -> bool:
    try:
        if args.uds:
            _, writer = await asyncio.open_unix_connection(args.uds)
        else:
            _, writer = await asyncio.open_connection(_host(args), args.port)
    except OSError:
        return False
    writer.close()
    return True
