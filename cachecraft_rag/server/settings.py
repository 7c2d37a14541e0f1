"""Settings of requests over HTTP, of a server over vLLM and of one without."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypedDict, get_args

from cachecraft_rag.checks import check_choice, check_flag, check_kind, check_text
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import PlainPromptsMode
from cachecraft_rag.server.wire import LONGEST_SESSION

ClientSettings = Literal["none", "safe", "all"]


_TENANT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")


class Headers(Protocol):
    """The headers of a request; `starlette.datastructures.Headers`."""

    def getlist(self, key: str) -> Sequence[str]:
        """Return all values of a header, [] without it; its name may have any case."""


class _PlainPrompts(TypedDict):
    plain_prompts: PlainPromptsMode


# Fields of `ReuseConfig`: an engine over vLLM reuses chunks only. A server's endpoint also reuses text of plain prompts
# (`EndpointSettings`).
OFF: _PlainPrompts = {"plain_prompts": "off"}


@dataclass(frozen=True)
class EndpointSettings:
    """Settings of requests over HTTP; set by the server's operator, never by a request's body.

    root             folder of the store, which may hold a calibration
    model            model name in requests
    session_header   header with the session of a request, set by a trusted proxy; two are refused; None: no sessions
    tenant_header    header with the tenant of each request, set by a trusted proxy: its namespace; None: one tenant
    client_settings  reuse settings that a request may change: "none"; "all"; "safe", all too, but it captures nothing
                     if they would shape chunk-caches
    plain_prompts    reuse of text in requests without documents, see docs/guides/any_application.md
    search_system    True if system messages of such requests are searched too: applications may put the context there
    admin_keys       keys that allow priming and eviction, in addition to the server's own key; (): no client may do
                     either; None: every client may
    """

    root: str = ""
    model: str = ""
    session_header: str | None = None
    client_settings: ClientSettings = "safe"
    plain_prompts: PlainPromptsMode = "off"
    search_system: bool = False
    admin_keys: tuple[str, ...] | None = field(default=(), repr=False)
    tenant_header: str | None = None

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        for name in ("root", "model"):
            check_text(name, getattr(self, name))
        check_flag("search_system", self.search_system)
        for name in ("session_header", "tenant_header"):
            check_text(name, getattr(self, name), optional=True, empty=False)
        if self.tenant_header and self.tenant_header.lower() == (self.session_header or "").lower():
            raise ConfigError("tenant_header and session_header must be two headers")
        check_choice("plain_prompts", self.plain_prompts, get_args(PlainPromptsMode))
        check_choice("client_settings", self.client_settings, get_args(ClientSettings))
        check_kind("admin_keys", self.admin_keys, tuple, optional=True, advice='write ("key",)')
        for key in self.admin_keys or ():
            check_text("each key of admin_keys", key, empty=False)
        if self.search_system and self.plain_prompts == "off":
            raise ConfigError(
                "search_system has no effect without plain_prompts: add --reuse-plain-prompts"
            )

    def session_in(self, headers: Headers) -> str | None:
        """Return the session, 1 to 256 characters, in the header `session_header`; None without setting or header."""
        header = self.session_header
        session = None if header is None else _single(headers, header)
        if session is not None and not 0 < len(session) <= LONGEST_SESSION:
            raise ConfigError(f"{header} must have 1 to {LONGEST_SESSION} characters")
        return session

    def tenant_in(self, headers: Headers) -> str:
        """Return the tenant in the header `tenant_header`; "" if this server has one tenant. A request must name one.

        Names are as safe as those of files: 1 to 64 letters of ASCII, digits, ".", "_" and "-", no "." or "-" first.
        """
        header = self.tenant_header
        if header is None:
            return ""
        tenant = _single(headers, header)
        if tenant is None:
            raise ConfigError(
                f"this server serves several tenants: name one in the header {header}"
            )
        if not _TENANT.fullmatch(tenant):
            raise ConfigError(
                f"{header} must have 1 to 64 letters of ASCII, digits, '.', '_' and '-', and begin with a letter, a "
                "digit or '_'"
            )
        return tenant


def _single(headers: Headers, name: str) -> str | None:
    """Return the value of a header. Raises ConfigError for two: the proxy's may be the second one."""
    values = headers.getlist(name)
    if len(values) > 1:
        raise ConfigError(f"the header {name} was sent twice; let the proxy replace the client's")
    return values[0] if values else None
