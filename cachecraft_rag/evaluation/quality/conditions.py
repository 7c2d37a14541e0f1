"""How chunks are captured before they are reused: behind what on purpose, or as the stream of questions has it.

`CONDITIONS` is the one registry. In all but `stream` each distinct chunk is captured once, behind what depends on the seed
and the chunk alone, so every method finds the same caches, in an interrupted evaluation too.
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

SIMILAR_CHUNKS = 2  # as many as the most unrelated ones, so that the two conditions differ in likeness alone

Embed = Callable[[Sequence[str]], "NDArray[np.float32]"]  # texts → unit vectors `[texts, dim]`


class Surroundings:
    """What a chunk can be captured behind.

    Args:
        embed: for `similar`; None = the embedded model, loaded when it is needed.
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
        """One or two chunks of other documents; ConfigError where there is none."""
        own = self.dataset.document_of(chunk.chunk_id)
        others = [other for document in self.dataset.documents if document is not own for other in document]
        if not others:
            raise ConfigError(
                "the questions' file has one document only, so nothing in it is unrelated; choose other captures: "
                "neighbours, alone or stream"
            )
        draw = random.Random(f"{self.seed}/{chunk.chunk_id}")
        return draw.sample(others, min(len(others), draw.randint(1, 2)))

    def neighbours(self, chunk: Chunk) -> list[Chunk]:
        """The chunks before it in its document; those furthest from it are left out where they do not fit a pass."""
        return list(self.dataset.neighbours(chunk.chunk_id))

    def similar(self, chunk: Chunk) -> list[Chunk]:
        """The most similar chunks of the whole dataset, the nearest last (FusionRAG)."""
        own = self._places[chunk.chunk_id]
        likeness = self._vectors @ self._vectors[own]
        nearest = [place for place in likeness.argsort(kind="stable")[::-1].tolist() if place != own]
        return [self._chunks[place] for place in reversed(nearest[:SIMILAR_CHUNKS])]


@dataclass(frozen=True, slots=True)
class Condition:
    """A way for chunks to be captured.

    behind  what a chunk is captured behind; None where captures arise as in use
    """

    name: str
    description: str
    behind: Callable[[Surroundings, Chunk], Sequence[Chunk]] | None


_ALL = (
    Condition("unrelated", "behind 1 or 2 chunks of other documents", Surroundings.unrelated),
    Condition("neighbours", "behind the chunks before it in its document", Surroundings.neighbours),
    Condition("alone", "behind the instruction alone", lambda _, chunk: ()),
    Condition("similar", "behind the most similar chunks of all documents (FusionRAG)", Surroundings.similar),
    Condition("stream", "as the questions before left it, after a warm-up", None),
)

CONDITIONS: Mapping[str, Condition] = MappingProxyType({condition.name: condition for condition in _ALL})


def condition_named(name: str) -> Condition:
    """The condition of that name; ConfigError lists the known ones."""
    try:
        return CONDITIONS[name]
    except KeyError:
        raise ConfigError(f"unknown captures {name!r}; choose one of {', '.join(CONDITIONS)}") from None


class Captures(Protocol):
    """Keeps a store as the condition wants it. Effects on the store are done when a call returns."""

    def before(self, question: Question) -> None:
        """Called before a question's methods are measured, not for a question that has been measured already."""
        ...

    def after(self, question: Question) -> None:
        """Called after every question, those of the warm-up and those measured already too."""
        ...


class ControlledCaptures:
    """Each chunk is captured behind what the condition says, before the first question that needs it."""

    def __init__(self, engine: Engine, behind: Callable[[Chunk], Sequence[Chunk]]) -> None:
        self._primer, self._behind = Primer(engine), behind

    def before(self, question: Question) -> None:
        """See `Captures`."""
        for chunk in question.passages:
            self._primer.capture(chunk, self._behind(chunk))

    def after(self, question: Question) -> None:
        """See `Captures`."""


class StreamedCaptures:
    """Each question, once measured, is asked once more with the default settings, captures on."""

    def __init__(self, engine: Engine, *, answer_tokens: int) -> None:
        self._engine, self._answer_tokens = engine, answer_tokens

    def before(self, question: Question) -> None:
        """See `Captures`."""

    def after(self, question: Question) -> None:
        """See `Captures`."""
        engine = self._engine
        sampling = SamplingParams(max_new_tokens=self._answer_tokens)
        asked = engine.stream(question.text, question.passages, sampling=sampling, config=ReuseConfig())
        next(asked, None)
        asked.close()  # what is captured is known with the first token
        engine.write_back.wait_for([engine.prompts.system.segment_id, *_ids(question.passages)])


def origins_of(
    condition: Condition, engine: Engine, dataset: Dataset, *, seed: int, answer_tokens: int, embed: Embed | None = None
) -> Captures:
    """What brings a condition about in the engine's store, which should be empty."""
    if (behind := condition.behind) is None:
        return StreamedCaptures(engine, answer_tokens=answer_tokens)
    surroundings = Surroundings(dataset, seed=seed, embed=embed)
    return ControlledCaptures(engine, lambda chunk: behind(surroundings, chunk))


def _ids(chunks: Iterable[Chunk]) -> list[str]:
    return [chunk.chunk_id for chunk in chunks]
