"""Base class of everything that must be closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closeable(ABC):
    """Holds threads, files or locks until `close`; leaving a `with` block closes it, also on an error."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way and let go of everything; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
