"""Where the rows and keys of several requests lie in tensors that hold all of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Several requests in one launch; their keys lie one after the other, or in the blocks of a paged cache.

    row_edges   int32 `[requests + 1]`: request i has the rows `row_edges[i]:row_edges[i + 1]`; none is fine
    most_rows   of one request: on the host, so that nothing waits for the device
    most_keys   of one request
    key_starts  int64 `[requests]`: position p of request i is key `key_starts[i] + p`; None = keys are paged
    blocks      int32 `[requests, most blocks of one]`: its block of each part of the prompt; None = keys are contiguous
    absent      bool `[requests, most_keys]`: positions that no row sees; None = all are there
    """

    row_edges: Tensor
    most_rows: int
    most_keys: int
    key_starts: Tensor | None = None
    blocks: Tensor | None = None
    absent: Tensor | None = None

    @property
    def requests(self) -> int:
        """How many there are."""
        return self.row_edges.shape[0] - 1
