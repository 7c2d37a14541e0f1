"""Protocol of a remote server. There are two implementations: Redis and object stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")
# Exceptions that a library may raise for an unexpected answer, besides its own. None of them may stop the sender.
ODD_ANSWERS = (
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    OSError,
)
# bytes of all rows of a chunk; further rows are ignored, here and on the server
LONGEST_ROWS = 4 << 20
PIECE_BYTES = 1 << 20  # bytes per piece of a transfer, which can be cancelled between two pieces


@dataclass(frozen=True)
class Parcel:
    """A chunk-cache on its way to a remote.

    name      `rows.name_of` its variant
    row       its row, signed if the remote uses a key
    payload   its bytes, in consecutive parts
    replaces  name of an entry of the same variant to remove, if it still exists
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
    """Contents of a remote, including those of other engines.

    nbytes  bytes of all payloads
    budget  the server's own limit in bytes; None if it has no limit or does not report one
    """

    variants: int
    nbytes: int
    budget: int | None = None


async def answer_of(
    asking: Awaitable[T], failure: Callable[[Exception], OSError], *errors: type[Exception]
) -> T:
    """Return a library's answer; replace exceptions in `errors` and `ODD_ANSWERS` by `failure(exception)`.

    The replacement, an OSError, is raised outside the handler: the library's message may hold a secret, and must not be
    among the causes. Other exceptions, such as CancelledError, pass unchanged.
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
        """Return name → row for each place, in the order of the places, in as few round trips as possible.

        If a place has more than `MOST_VARIANTS` rows or `LONGEST_ROWS` bytes of rows, some or all are left out: engines
        never write that many. A place without rows has an empty dictionary. Entries without a payload are left out.

        Raises OSError if the server fails; a shared folder that has vanished counts as that.
        """

    async def names(self, place: str) -> list[str]:
        """Return the names of the complete entries in a place, [] if it has none.

        An entry is complete if it has both a row and a payload. Names include the place, as those of `lookup` do, and
        are in no order. Of a place with more rows than `lookup` accepts, some or all may be left out. Raises OSError if
        the server fails.
        """

    def read(self, name: str) -> AsyncIterator[bytes | memoryview]:
        """Yield the payload of an entry in order, in pieces of about PIECE_BYTES; nothing if the entry is missing.

        Raises OSError, while it is iterated over, if the server fails.
        """

    async def write(self, parcel: Parcel) -> bool:
        """Send payload and row, the row visible only after its payload. Returns False if there is no room, else True.

        Raises OSError if the server fails.
        """

    async def remove(self, name: str) -> None:
        """Remove an entry, if it exists. Raises OSError if the server fails."""

    async def usage(self) -> Usage:
        """Return the number of complete entries on the server, the bytes of all payloads, and its limit, if any.

        Raises OSError if the server fails.
        """

    async def probe(self) -> None:
        """Send the cheapest request that the server answers. Raises OSError if it does not."""

    async def close(self) -> None:
        """Close all connections. Raises OSError if that fails."""
