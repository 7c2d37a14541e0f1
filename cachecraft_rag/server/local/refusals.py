"""Refused requests, and errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cachecraft_rag.errors import (
    BusyError,
    CacheCraftError,
    ConfigError,
    ContextLengthError,
    StoreError,
    UnsupportedCallError,
    says_no_memory,
)
from cachecraft_rag.server.wire import CONTEXT_LENGTH_CODE

_RETRY_S = 1  # advice to clients of a busy server


@dataclass
class Refused(Exception):
    """A request that is refused; `type` and `code` as in OpenAI's errors."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, object]:
        """Return the error in OpenAI's form."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def refused(error: Exception) -> Refused:
    """Return the refusal for an error: a `Refused` itself; else status 400 for a wrong request, 503 if busy, or 500."""
    if isinstance(error, Refused):
        return error
    message = str(error).replace("max_new_tokens", "max_tokens")  # the name in requests
    if isinstance(error, BusyError):
        headers = {"Retry-After": str(_RETRY_S)}
        return Refused(503, message, type="server_error", code="server_busy", headers=headers)
    if isinstance(error, ContextLengthError):
        return Refused(400, message, code=CONTEXT_LENGTH_CODE, param="messages")
    if isinstance(error, StoreError):
        return Refused(500, message, type="server_error", code="store_error")
    if isinstance(error, ConfigError | UnsupportedCallError):
        return Refused(400, message)
    if isinstance(error, CacheCraftError):
        return Refused(500, message, type="server_error", code="internal_error")
    if says_no_memory(error):
        message = "there is no memory for this request; send fewer documents, or lower max_tokens"
        return Refused(500, message, type="server_error", code="out_of_memory")
    message = f"the server failed ({type(error).__name__}); its log has the error"
    return Refused(500, message, type="server_error", code="internal_error")
