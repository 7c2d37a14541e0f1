"""Origin conditions: what chunks were captured behind before a question reuses them.

`CONDITIONS` is the one registry. Under every condition but `stream`, each distinct chunk is captured once, behind
chunks that depend on the seed and the chunk alone. So every method finds the same chunk-caches, also after an
interruption.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from cachecraft_rag.engine.priming import Primer
from cachecraft_rag.engine.sampling import SamplingParams
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.formats.dataset import Dataset, Question
    from cachecraft_rag.types import Chunk

SIMILAR_CHUNKS = 2  # as many as `unrelated` draws at most, so that the two conditions differ in similarity alone

Embed = Callable[[Sequence[str]], "NDArray[np.float32]"]  # texts → unit vectors `[texts, dim]`


class Surroundings:
    """The chunks that a chunk can be captured behind.

    Args:
        embed: for `similar`; None = the bundled embedding model, loaded on first use.
    """

    def __init__(self, dataset: Dataset, *, seed: int, embed: Embed | None = None) -> None:
        self.dataset, self.seed, self._embed = dataset, seed, embed

    @cached_property
    def _chunks(self) -> list[Chunk]:
        return [chunk for document in self.dataset.documents for chunk in document]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {chunk.chunk_id: place for place, chunk in enumerate(self._chunks)}

    @cached_property
    def _vectors(self) -> NDArray[np.float32]:
        embed = self._embed
        if embed is None:
            from cachecraft_rag.retrievers.embeddings import Embedder

            embed = Embedder().encode_document
        return embed([chunk.text for chunk in self._chunks])

    def unrelated(self, chunk: Chunk) -> list[Chunk]:
        """One or two chunks of other documents; ConfigError if there are no other documents."""
        own = self.dataset.document_of(chunk.chunk_id)
        others = [other for document in self.dataset.documents if document is not own for other in document]
        if not others:
            raise ConfigError(
                "the file of questions has only one document, so no chunk in it is unrelated; choose another origin: "
                "neighbours, alone or stream"
            )
        draw = random.Random(f"{self.seed}/{chunk.chunk_id}")
        return draw.sample(others, min(len(others), draw.randint(1, 2)))

    def neighbours(self, chunk: Chunk) -> list[Chunk]:
        """The chunks before it in its document. `Primer` drops the furthest ones if they do not fit into one pass."""
        return list(self.dataset.neighbours(chunk.chunk_id))

    def similar(self, chunk: Chunk) -> list[Chunk]:
        """The most similar chunks of the whole dataset, the nearest last (FusionRAG)."""
        own = self._places[chunk.chunk_id]
        similarity = self._vectors @ self._vectors[own]  # [chunks]
        nearest = [place for place in similarity.argsort(kind="stable")[::-1].tolist() if place != own]
        return [self._chunks[place] for place in reversed(nearest[:SIMILAR_CHUNKS])]


@dataclass(frozen=True, slots=True)
class OriginCondition:
    """A rule for the origin prefixes of chunks.

    behind  the chunks that a chunk is captured behind; None if captures are left to the questions, as in production
    """

    name: str
    description: str
    behind: Callable[[Surroundings, Chunk], Sequence[Chunk]] | None


_ALL = (
    OriginCondition("unrelated", "behind 1 or 2 chunks of other documents", Surroundings.unrelated),
    OriginCondition("neighbours", "behind the chunks before it in its document", Surroundings.neighbours),
    OriginCondition("alone", "behind the instruction alone", lambda _, chunk: ()),
    OriginCondition("similar", "behind the most similar chunks of all documents (FusionRAG)", Surroundings.similar),
    OriginCondition("stream", "as captured while earlier questions were answered, after a warm-up", None),
)

CONDITIONS: Mapping[str, OriginCondition] = MappingProxyType({condition.name: condition for condition in _ALL})


def condition_named(name: str) -> OriginCondition:
    """The condition of that name; ConfigError lists the known names."""
    try:
        return CONDITIONS[name]
    except KeyError:
        raise ConfigError(f"unknown origin condition {name!r}; choose one of {', '.join(CONDITIONS)}") from None


class Origins(Protocol):
    """Keeps a store in the state that the condition asks for. Changes to the store are complete when a call returns."""

    def before(self, question: Question) -> None:
        """Called before a question is measured; skipped for a question that an earlier run has measured."""
        ...

    def after(self, question: Question) -> None:
        """Called after every question, including those of the warm-up and those that an earlier run has measured."""
        ...


class ControlledOrigins:
    """Captures each chunk behind the chunks that the condition names, before the first question that needs it."""

    def __init__(self, engine: Engine, behind: Callable[[Chunk], Sequence[Chunk]]) -> None:
        self._primer, self._behind = Primer(engine), behind

    def before(self, question: Question) -> None:
        """See `Origins`."""
        for chunk in question.passages:
            self._primer.capture(chunk, self._behind(chunk))

    def after(self, question: Question) -> None:
        """See `Origins`."""


class StreamedOrigins:
    """Asks each measured question once more with the default settings, which capture."""

    def __init__(self, engine: Engine, *, answer_tokens: int) -> None:
        self._engine, self._answer_tokens = engine, answer_tokens

    def before(self, question: Question) -> None:
        """See `Origins`."""

    def after(self, question: Question) -> None:
        """See `Origins`."""
        engine = self._engine
        sampling = SamplingParams(max_new_tokens=self._answer_tokens)
        asked = engine.stream(question.text, question.passages, sampling=sampling, config=ReuseConfig())
        next(asked, None)
        asked.close()  # prefill captures, so the first token is enough
        next(asked, None)  # an ended answer waits here until its captures are handed over
        engine.write_back.wait_for([engine.prompts.system.segment_id, *_ids(question.passages)])


def origins_of(
    condition: OriginCondition,
    engine: Engine,
    dataset: Dataset,
    *,
    seed: int,
    answer_tokens: int,
    embed: Embed | None = None,
) -> Origins:
    """The object that brings the condition about in the engine's store, which should be empty."""
    if (behind := condition.behind) is None:
        return StreamedOrigins(engine, answer_tokens=answer_tokens)
    surroundings = Surroundings(dataset, seed=seed, embed=embed)
    return ControlledOrigins(engine, lambda chunk: behind(surroundings, chunk))


def _ids(chunks: Iterable[Chunk]) -> list[str]:
    return [chunk.chunk_id for chunk in chunks]
