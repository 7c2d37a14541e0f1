"""Costs that grow with the number of chunks: finding them, looking up their chunk-caches, and planning.

The vectors are random directions: they form no groups, so nothing is harder for a search that compares only candidates.
Index and catalog are those of the package, in a temporary folder; there are no tensors.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, TypeVar

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import numbers, print_json, progress_bar
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.planning.planner import make_plan
from cachecraft_rag.planning.scoring import context_impact
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.store.catalog import Catalog
from cachecraft_rag.store.catalog_records import Limits
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.progress import Progress
from cachecraft_rag.types.prompts import Prompt, Segment
from cachecraft_rag.types.variants import Variant, VariantKey

T = TypeVar("T")
_DIM = 384  # the bundled embedding model's
_TOKENS = 256  # of a chunk
_TOGETHER = 10_000  # chunks of one document, and of one transaction
_NAMESPACE, _MODEL = "scale", "2-" + "0" * 32
_SYSTEM, _QUESTION = (
    Segment("system", "0" * 32, (0,) * 32),
    Segment("question", "1" * 32, (0,) * 16),
)


@dataclass(frozen=True, slots=True)
class ScaleCell:
    """Medians over the queries, in milliseconds.

    retrieve_ms, exact_ms  a search as it is, and with all vectors compared
    recall                 share of the `k` nearest that the first finds
    lookup_ms, plan_ms     for the `k` chunks of a question
    first_search_s         the search that brings a new process's index up to date
    """

    chunks: int
    retrieve_ms: float
    exact_ms: float
    recall: float
    lookup_ms: float
    plan_ms: float
    first_search_s: float


def run(
    sizes: Sequence[int],
    *,
    queries: int = 50,
    k: int = 10,
    progress: Callable[[Progress], object] | None = None,
) -> Iterator[ScaleCell]:
    """Measure at each size, the smallest first; raises ConfigError for sizes that cannot be.

    Args:
        sizes: numbers of chunks.
        queries: at each size.
        k: chunks of a question.
        progress: called with the number of chunks stored.
    """
    sizes = sorted(set(sizes))
    if not sizes or sizes[0] < k:
        raise ConfigError(f"each size must be at least the {k} chunks of a question")
    with tempfile.TemporaryDirectory(prefix="cachecraft-scale-") as folder:
        stored: list[str] = []
        for size in sizes:
            with (
                FaissStore.open(
                    Path(folder) / "index", dim=_DIM, embedder_fingerprint="none@0"
                ) as index,
                closing(Catalog(Path(folder) / "catalog.sqlite")) as catalog,
            ):
                while len(stored) < size:
                    count = min(_TOGETHER, size - len(stored))
                    stored += _store(index, catalog, first=len(stored), count=count)
                    if progress is not None:
                        progress(Progress(len(stored), sizes[-1], "chunks stored"))
                yield _measure(index, catalog, stored, queries=queries, k=k)


def _store(index: FaissStore, catalog: Catalog, *, first: int, count: int) -> list[str]:
    """Chunks with the numbers from `first` on: text and vector into the index, a variant into the catalog."""
    chunks = [Chunk(f"Chunk {number}.") for number in range(first, first + count)]
    index.upsert(f"document {first}", chunks, _directions(count, seed=first))
    limits = Limits(disk_bytes=1 << 60, max_variants=1 << 40, variants_per_chunk=64)
    for number, chunk in enumerate(chunks, first):
        variant = _variant(chunk.chunk_id, float(number))
        catalog.commit(
            variant, TokenScores(), file_bytes=variant.nbytes, writer="scale", limits=limits
        )
    return [chunk.chunk_id for chunk in chunks]


def _measure(
    index: FaissStore, catalog: Catalog, stored: Sequence[str], *, queries: int, k: int
) -> ScaleCell:
    started = time.perf_counter()
    index.search(_directions(1, seed=len(stored))[0], k)
    first_search_s = time.perf_counter() - started
    chosen = np.random.default_rng(len(stored))
    times: dict[str, list[float]] = {"retrieve": [], "exact": [], "lookup": [], "plan": []}
    found = 0
    for query in _directions(queries, seed=len(stored) + 1):
        hits = _timed(times["retrieve"], partial(index.search, query, k))
        right = _timed(times["exact"], partial(index.search, query, k, exact=True))
        found += len({hit.chunk_id for hit in hits} & {hit.chunk_id for hit in right})
        names = [stored[number] for number in chosen.choice(len(stored), k, replace=False)]
        variants, _ = _timed(times["lookup"], partial(catalog.find, _NAMESPACE, _MODEL, names))
        segments = [Segment("chunk", name, (0,) * _TOKENS) for name in names]
        prompt = Prompt((_SYSTEM, *segments, _QUESTION))
        _timed(times["plan"], partial(make_plan, prompt, variants, ReuseConfig()))
    milliseconds = {f"{name}_ms": 1000.0 * median(each) for name, each in times.items()}
    return ScaleCell(
        len(stored), recall=found / (queries * k), first_search_s=first_search_s, **milliseconds
    )


def _timed(times: list[float], act: Callable[[], T]) -> T:
    started = time.perf_counter()
    done = act()
    times.append(time.perf_counter() - started)
    return done


def _directions(count: int, *, seed: int) -> NDArray[np.float32]:
    """Unit vectors `[count, dim]`."""
    vectors = np.random.default_rng(seed).standard_normal((count, _DIM), dtype=np.float32)
    unit: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit


def _variant(chunk_id: str, created: float) -> Variant:
    """A variant that was captured after one other chunk."""
    key = VariantKey(
        namespace=_NAMESPACE,
        fingerprint=_MODEL,
        chunk_id=chunk_id,
        origin_prefix=(_SYSTEM.segment_id, "2" * 32),
    )
    inter, intra = (0.2 * _TOKENS,), 0.8 * _TOKENS
    return Variant(
        key=key,
        variant_id=key.variant_id,
        tokens=_TOKENS,
        tokens_digest=Segment("chunk", chunk_id, (0,) * _TOKENS).tokens_digest,
        inter=(0.0, *inter),
        intra=intra,
        cci=context_impact(inter=inter, prefix_tokens=[_TOKENS], intra=intra, tokens=_TOKENS),
        exact_share=1.0,
        session=None,
        codec="raw",
        nbytes=_TOKENS * 46_080,
        reuse_frequency=0.0,
        created=created,
    )


def main(
    sizes: Annotated[
        str,
        typer.Option(
            "--sizes", help="Numbers of chunks, comma-separated. A million take 8 GB of disk."
        ),
    ] = "1000,10000,100000",
    queries: Annotated[int, typer.Option("--queries", min=1, help="At each size.")] = 50,
    top_k: Annotated[int, options.option_of("top_k", min=1)] = 10,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Retrieval, look-up and planning as the number of chunks grows."""
    options.set_threads(threads)
    with progress_bar("Benchmark", remaining=True) as show:
        cells = list(
            run([int(size) for size in numbers(sizes)], queries=queries, k=top_k, progress=show)
        )
    if as_json:
        print_json({"sizes": [asdict(cell) for cell in cells]})
        return
    table = Table("chunks", "retrieve", "all compared", "recall", "look up", "plan", "first search")
    for cell in cells:
        times = (cell.retrieve_ms, cell.exact_ms, cell.lookup_ms, cell.plan_ms)
        retrieve, exact, lookup, plan = (f"{value:.2f} ms" for value in times)
        table.add_row(
            f"{cell.chunks:,}",
            retrieve,
            exact,
            f"{cell.recall:.3f}",
            lookup,
            plan,
            f"{cell.first_search_s:.1f} s",
        )
    out.print(table)
