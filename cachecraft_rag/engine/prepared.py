"""What a request has before its prefill, and after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from cachecraft_rag.compute.kv_buffer import KVBuffer
from cachecraft_rag.compute.resolve import Resolved
from cachecraft_rag.engine.announced import Announcement
from cachecraft_rag.store.loading.loader import Loader
from cachecraft_rag.store.loading.pending import PendingLoads


@dataclass
class Prepared:
    """A resolved plan whose loading has begun; `close` it."""

    resolved: Resolved
    loads: PendingLoads
    loader: Loader
    closed: bool = False

    @classmethod
    def of(cls, resolved: Resolved, loader: Loader) -> Self:
        """Begin to load what the plan needs."""
        return cls(resolved, loader.begin(resolved.to_load), loader)

    def serves(self, other: Resolved) -> bool:
        """Whether it takes the same from the store as another plan of the same prompt."""
        return _chosen(self.resolved) == _chosen(other)

    def close(self) -> None:
        """End loading; what came whole stays in memory. May be called twice."""
        if not self.closed:
            self.closed = True
            self.loader.end(self.loads)
            self.resolved.close()


@dataclass(frozen=True)
class Prefilled:
    """A prompt that is ready to be answered: `logits` `[vocabulary]` of its last token, and what to go on with."""

    logits: Tensor
    buffer: KVBuffer
    announcement: Announcement


def _chosen(resolved: Resolved) -> list[str | None]:
    """The variant of each segment."""
    return [None if one.variant is None else one.variant.variant_id for one in resolved.plan.segments]
