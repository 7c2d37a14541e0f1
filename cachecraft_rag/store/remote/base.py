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
    replaces  name of an entry of the same variant, to be removed once this one is sent
    """

    name: str
    row: bytes
    payload: tuple[memoryview, ...]
    replaces: str | None = None

    @property
    def place(self) -> str:
        """Folder of its chunk: `name` up to its last slash, without the slash; "" if there is no slash in it."""
        return self.name.rpartition("/")[0]

    @property
    def nbytes(self) -> int:
        """Number of bytes of payload and row together."""
        return sum(part.nbytes for part in self.payload) + len(self.row)


@dataclass(frozen=True, slots=True)
class Usage:
    """Contents of a remote in this layout version, including those of other engines.

    variants  number of complete entries, which have a row and a payload
    nbytes    bytes of their payloads; Redis also counts payloads whose row is missing
    budget    limit in bytes: `maxmemory` of Redis, `RemoteConfig.budget_bytes` or 20 GiB of a folder; None without one
    """

    variants: int
    nbytes: int
    budget: int | None = None


async def answer_of(
    asking: Awaitable[T], failure: Callable[[Exception], OSError], *errors: type[Exception]
) -> T:
    """Await `asking` and return its result; an exception in `errors` or `ODD_ANSWERS` is replaced.

    The replacement is `failure(exception)`, an OSError. It has no cause or context, because the library's message
    may hold a secret. Other exceptions, such as CancelledError, pass unchanged.
    """
    expected: tuple[type[Exception], ...] = (*errors, *ODD_ANSWERS)
    try:
        return await asking
    except expected as error:
        meant = failure(error)
    raise meant


class Backend(Protocol):
    """One kind of server. All coroutines run in one event loop, and any of them may be cancelled at any await.

    Only one `write` runs at a time; the other methods may run beside it. Time limits are the caller's concern. Every
    failure of the server is an OSError, with no secret in its text. Names and places are those of `rows`: ASCII, and
    safe as keys and as paths. An entry is complete if it has both a row and a payload; others count as absent. If a
    shared folder has vanished, `rows` and `write` raise OSError; for the other methods it has no entries, and `probe`
    does not notice it.
    """

    async def rows(self, places: Sequence[str]) -> list[dict[str, bytes]]:
        """Return name → row of the complete entries for each place, in their order, in as few round trips as possible.

        Of a place with more than `LONGEST_ROWS` bytes of rows, or more than 64 rows and more than
        `RemoteTuning.variants_per_chunk`, some or all are left out: engines never write that many.
        """

    async def names(self, place: str) -> list[str]:
        """Return the names of the complete entries in a place, with the place, in no order; of too many maybe none."""

    def read(self, name: str) -> AsyncIterator[bytes | memoryview]:
        """Yield the payload of this name, even without a row, in pieces of about PIECE_BYTES; nothing if missing."""

    async def write(self, parcel: Parcel) -> bool:
        """Send payload and row, the row visible only after its payload. Returns False if there is no room, else True.

        An entry of the same name is replaced. `parcel.replaces` is ignored here: the caller removes it.
        """

    async def remove(self, name: str) -> None:
        """Remove row and payload of an entry; does nothing for an unknown name."""

    async def usage(self) -> Usage:
        """Return the contents of the remote. Lists all entries of all engines."""

    async def probe(self) -> None:
        """Send the cheapest request that the server answers."""

    async def close(self) -> None:
        """Close all connections of Redis; object stores have none to close."""
