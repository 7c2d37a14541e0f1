"""Protocol of a remote server. Two implementations stand: Redis and object stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")
# What a library may raise for an unexpected answer, besides its own errors: none of it may end all sending.
ODD_ANSWERS = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RuntimeError, OSError)
LONGEST_ROWS = 4 << 20  # all rows of a chunk together; what is beyond is passed over, here and on the server
PIECE_BYTES = 1 << 20  # of a transfer: large enough for the wire, small enough to be given up between two


@dataclass(frozen=True)
class Parcel:
    """A chunk-cache on its way to a remote.

    name      `rows.name_of` its variant
    row       its row, signed where the remote is
    payload   its bytes, in parts that follow each other
    replaces  name of an entry of the same variant that gives way, if it is still there
    """

    name: str
    row: bytes
    payload: tuple[memoryview, ...]
    replaces: str | None = None

    @property
    def place(self) -> str:
        """Folder of its chunk."""
        return self.name.rpartition("/")[0]

    @property
    def nbytes(self) -> int:
        """Bytes of payload and row."""
        return sum(part.nbytes for part in self.payload) + len(self.row)


@dataclass(frozen=True, slots=True)
class Usage:
    """Contents of a remote, of all engines that use it.

    nbytes  of payloads
    budget  the server's own limit in bytes; None where it has none, or says nothing of it
    """

    variants: int
    nbytes: int
    budget: int | None = None


async def answer_of(asking: Awaitable[T], failure: Callable[[Exception], OSError], *errors: type[Exception]) -> T:
    """Await a library's answer; where it raises one of `errors` or `ODD_ANSWERS`, raise what `failure` makes of it.

    Raised outside the handler: the library's message may hold a secret, and stays out of the chain of causes.
    """
    expected: tuple[type[Exception], ...] = (*errors, *ODD_ANSWERS)
    try:
        return await asking
    except expected as error:
        meant = failure(error)
    raise meant


class Backend(Protocol):
    """One kind of server. All coroutines run in one event loop, and any of them may be cancelled at any await.

    Time limits are the caller's concern. Every failure of the server is an OSError, with no secret in its text.
    Names and places are those of `rows`: ASCII, and safe as keys and as paths. A row whose payload the server has
    evicted counts as absent.
    """

    async def lookup(self, places: Sequence[str]) -> list[dict[str, bytes]]:
        """Rows in each place, by name, in as few round trips as possible.

        Of a place with more than `MOST_VARIANTS` or `LONGEST_ROWS` bytes of them, not all: no engine of ours has
        written that many.
        """

    async def names(self, place: str) -> list[str]:
        """Names of the entries in a place."""

    def read(self, name: str) -> AsyncIterator[bytes | memoryview]:
        """Payload of an entry in order, in pieces of about PIECE_BYTES.

        Ends at once when it is not there.
        """

    async def write(self, parcel: Parcel) -> bool:
        """Send payload and row; a row is seen only once its payload is there. False where there is no room."""

    async def remove(self, name: str) -> None:
        """Remove an entry, if it is there."""

    async def usage(self) -> Usage:
        """Count what lies there now."""

    async def probe(self) -> None:
        """Ask the cheapest question that has an answer. Raises OSError."""

    async def close(self) -> None:
        """Let go of every connection."""
