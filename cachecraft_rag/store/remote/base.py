"""What a server must be able to do for us. Two implementations stand: Redis and object stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

T = TypeVar("T")
# What a library raises of an answer that it did not expect, besides its own errors: it must not end all sending.
ODD_ANSWERS = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RuntimeError, OSError)
LONGEST_ROWS = 4 << 20  # all rows of a chunk together; what is beyond is passed over, here and on the server
PIECE_BYTES = 1 << 20  # of a transfer: large enough for the wire, small enough to be given up between two

Outcome = Literal["sent", "already there", "no room", "too slow"]


@dataclass(frozen=True)
class Parcel:
    """A chunk-cache on its way to a remote.

    place    folder of its chunk
    name     file name of its payload: variant id and `created`
    row      the bytes of its row, whose first 16 are `created`
    score    see `eviction.worth`: the lowest gives way first
    instead_of  a row of the same variant that has to go first, if it is still there
    """

    place: str
    name: str
    row: bytes
    score: float
    payload: tuple[memoryview, ...]
    instead_of: bytes | None = None

    @property
    def variant_id(self) -> str:
        """The variant's id."""
        return self.name[:32]

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload."""
        return sum(part.nbytes for part in self.payload)

    @property
    def nbytes(self) -> int:
        """What counts against the budget."""
        return self.payload_bytes + len(self.row)


@dataclass(frozen=True, slots=True)
class Usage:
    """What lies on a remote, of all engines that use it."""

    variants: int
    nbytes: int


async def told(asking: Awaitable[T], failure: Callable[[Exception], OSError], *errors: type[Exception]) -> T:
    """What a library answers; where it raises one of `errors` or `ODD_ANSWERS`, what `failure` makes of it.

    Raised outside the handler: what the library said may hold a secret, and stays out of the chain of causes.
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
    Names and places are those of `rows`: ASCII, and safe as keys and as paths.
    """

    async def lookup(self, places: Sequence[str]) -> list[list[bytes]]:
        """The rows in each place, as they are there, in as few round trips as can be.

        Of a place with more than `MOST_VARIANTS` or `LONGEST_ROWS` bytes of them, not all: no engine of ours has
        written that many.
        """
        ...

    def read(self, name: str) -> AsyncIterator[bytes | memoryview]:
        """The payload `place/name` in order, in pieces of about PIECE_BYTES.

        Ends at once when it is not there.
        """
        ...

    async def put(self, parcel: Parcel) -> Outcome:
        """Make room within the budget, send payload, then row; a row is seen only once its payload is there."""
        ...

    async def raise_score(self, gains: Mapping[str, float]) -> None:
        """Score += gain, by `place/name`; what is gone is passed over."""
        ...

    async def remove(self, name: str) -> None:
        """Remove payload and row of `place/name`, if they are there."""
        ...

    async def remove_row(self, place: str, row: bytes) -> None:
        """Remove a damaged row, if it is still exactly this one, so that a sound one may take its place."""
        ...

    async def usage(self) -> Usage:
        """What lies there now."""
        ...

    async def probe(self) -> None:
        """The cheapest question that has an answer. Raises OSError."""
        ...

    async def close(self) -> None:
        """Let go of every connection."""
        ...
