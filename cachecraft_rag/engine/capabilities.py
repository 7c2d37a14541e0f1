"""Calls that not every engine supports: what an engine cannot do is data, with the reason, and is checked here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from cachecraft_rag.errors import UnsupportedCallError


class Capability(StrEnum):
    """A call that an engine may not support.

    CAPTURE   `AnswerEngine.capture`
    LOOK_UP   `AnswerEngine.look_up`
    SYNC      `AnswerEngine.sync`
    TOOLS     questions with tools, or with calls of tools in their history
    """

    CAPTURE = "capture"
    LOOK_UP = "look_up"
    SYNC = "sync"
    TOOLS = "tools"


@dataclass(frozen=True)
class Capabilities:
    """The capabilities that an engine lacks, each with the reason and what to do instead."""

    missing: Mapping[Capability, str] = field(default_factory=lambda: MappingProxyType({}))

    def has(self, capability: Capability) -> bool:
        """Return True if a call is supported, False if it is among `missing`.

        >>> Capabilities({Capability.TOOLS: "ask elsewhere"}).has(Capability.CAPTURE)
        True
        """
        return capability not in self.missing

    def require(self, capability: Capability) -> None:
        """Raise UnsupportedCallError, with the reason, if a call is not supported; return None if it is.

        >>> Capabilities({Capability.TOOLS: "ask elsewhere"}).require(Capability.TOOLS)
        Traceback (most recent call last):
        cachecraft_rag.errors.UnsupportedCallError: ask elsewhere
        """
        if capability in self.missing:
            raise UnsupportedCallError(self.missing[capability])


ALL = Capabilities()
