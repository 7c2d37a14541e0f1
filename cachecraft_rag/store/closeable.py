"""What everything has in common that must be closed: `close`, and a `with` block that does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Base of what holds threads, files or locks. Leaving a `with` block closes it, also on an error."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is under way and let go of everything; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
