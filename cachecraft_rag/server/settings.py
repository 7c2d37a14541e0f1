"""Settings of requests over HTTP, of a server over vLLM and of one without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict, get_args

from cachecraft_rag.checks import check_choice, check_flag, check_kind, check_text
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import PlainPromptsMode
from cachecraft_rag.server.wire import LONGEST_SESSION

ClientSettings = Literal["none", "safe", "all"]


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
    session_header   header with the session of a request, set by a trusted proxy; None: no sessions
    client_settings  reuse settings that a request may change: "none"; "safe", those that affect only its own answer;
                     "all"
    plain_prompts    reuse of text in requests without documents, see docs/guides/any_application.md
    search_system    True if system messages of such requests are searched too: applications may put the context there
    admin_keys       keys that allow priming and eviction, in addition to vLLM's own key; (): no such key is required
    """

    root: str = ""
    model: str = ""
    session_header: str | None = None
    client_settings: ClientSettings = "safe"
    plain_prompts: PlainPromptsMode = "off"
    search_system: bool = False
    admin_keys: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        for name in ("root", "model"):
            check_text(name, getattr(self, name))
        check_flag("search_system", self.search_system)
        check_text("session_header", self.session_header, optional=True, empty=False)
        check_choice("plain_prompts", self.plain_prompts, get_args(PlainPromptsMode))
        check_choice("client_settings", self.client_settings, get_args(ClientSettings))
        check_kind("admin_keys", self.admin_keys, tuple, advice='write ("key",)')
        for key in self.admin_keys:
            check_text("each key of admin_keys", key, empty=False)
        if self.search_system and self.plain_prompts == "off":
            raise ConfigError(
                "search_system has no effect without plain_prompts: add --reuse-plain-prompts"
            )

    def session_in(self, headers: Mapping[str, str]) -> str | None:
        """Return the session, 1 to 256 characters, in the header `session_header`; None without that header."""
        header = self.session_header
        session = None if header is None else headers.get(header)
        if session is not None and not 0 < len(session) <= LONGEST_SESSION:
            raise ConfigError(f"{header} must have 1 to {LONGEST_SESSION} characters")
        return session
