"""Origin conditions: how chunks were captured before a question reuses them.

Under every condition but `stream`, the stored variants of a chunk depend on the dataset, the seed and the chunk alone.
So every method finds the same chunk-caches, also after an interruption.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.lookalikes import similarities
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.prompt.builder import STAND_IN
from cachecraft_rag.serving.priming import CHUNKS_BEFORE, Primer
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import RowFilter
from cachecraft_rag.types.documents import Chunk

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.dataset import Dataset, EvaluationQuestion

# dataset, chunk, seed → the chunks that it is captured after
OriginPrefix = Callable[["Dataset", "Chunk", int], Sequence["Chunk"]]

DEFAULT_ORIGIN = "documents"


@dataclass(frozen=True, slots=True)
class OriginCondition:
    """A rule for how chunks are captured.

    Exactly one of three rules applies: the documents are primed, each chunk is captured after `origin_prefix`, or the
    questions capture.

    meaning            what the condition stands for, in one phrase
    origin_prefix      the chunks that a chunk is captured after, each chunk in a separate pass
    primes_documents   the documents of a question's passages are primed as `CacheCraft.prime` primes them
    """

    name: str
    meaning: str
    origin_prefix: OriginPrefix | None = None
    primes_documents: bool = False

    @property
    def is_stream(self) -> bool:
        """True if captures are left to the questions, as in production: the third rule. True for "stream" alone."""
        return self.origin_prefix is None and not self.primes_documents


def _neighbours(dataset: Dataset, chunk: Chunk, seed: int) -> Sequence[Chunk]:
    # `Primer` drops the furthest neighbours if they do not fit into one pass.
    return dataset.neighbours(chunk.chunk_id)


def _fixed_passage(dataset: Dataset, chunk: Chunk, seed: int) -> Sequence[Chunk]:
    return [Chunk(STAND_IN)]


def _unrelated(dataset: Dataset, chunk: Chunk, seed: int) -> Sequence[Chunk]:
    own_document = dataset.document_of(chunk.chunk_id)
    others = [
        other
        for document in dataset.documents
        if document is not own_document
        for other in document
    ]
    if not others:
        raise ConfigError(
            "the file of questions has only one document, so no chunk in it is unrelated; choose another origin: "
            "documents, stream, neighbours or alone"
        )
    draw = random.Random(f"{seed}/{chunk.chunk_id}")
    return draw.sample(others, min(len(others), draw.randint(1, 2)))


# In the order in which users should think of them.
_ALL = (
    OriginCondition(
        "documents",
        "each document primed, as `prime` and `index --prime` do it",
        primes_documents=True,
    ),
    OriginCondition("stream", "captured by the questions before, as without priming"),
    OriginCondition(
        "neighbours", "after the chunks before it in its document, one pass per chunk", _neighbours
    ),
    OriginCondition(
        "alone", "after a fixed passage, as `prime(alone=True)` does it", _fixed_passage
    ),
    OriginCondition(
        "unrelated", "after one or two chunks of other documents, the hardest case", _unrelated
    ),
)

CONDITIONS: Mapping[str, OriginCondition] = MappingProxyType(
    {condition.name: condition for condition in _ALL}
)


def condition_named(name: str) -> OriginCondition:
    """Return the condition of that name. Raises ConfigError for an unknown name; the message lists the known ones."""
    try:
        return CONDITIONS[name]
    except KeyError:
        raise ConfigError(
            f"unknown origin condition {name!r}; choose one of {', '.join(CONDITIONS)}"
        ) from None


@dataclass
class Origins:
    """Keeps the engine's store, which should be empty at first, in the state that a condition asks for.

    Changes to the store are complete when a call returns.
    """

    condition: OriginCondition
    engine: Engine
    dataset: Dataset
    seed: int
    answer_tokens: int

    def __post_init__(self) -> None:
        self._primer = Primer(self.engine, related=self._similar_chunks)
        self._primed: set[str] = set()  # the first chunk of each document
        self._asked_for = {
            chunk.chunk_id for question in self.dataset.questions for chunk in question.passages
        }

    def before(self, question: EvaluationQuestion) -> None:
        """Capture the chunks of a question that is measured next; with the origin "stream" do nothing.

        Chunks that are stored already are not captured again. With the origin "documents", the documents of the
        passages are primed, each once; chunks that do not fit a pass are left out, and chunk-caches that no question of
        the data set asks for are removed. With the others a chunk that does not fit raises ContextLengthError, and
        "unrelated" raises ConfigError if there is only one document.
        """
        if self.condition.primes_documents:
            for chunk in question.passages:
                self._prime(self.dataset.document_of(chunk.chunk_id))
        elif self.condition.origin_prefix is not None:
            for chunk in question.passages:
                prefix = self.condition.origin_prefix(self.dataset, chunk, self.seed)
                self._primer.capture(chunk, prefix)

    def _prime(self, document: tuple[Chunk, ...]) -> None:
        """Prime a document once, and keep only the chunk-caches that a question asks for.

        The others would fill the disk: documents of a question set may have a hundred times the chunks that are asked
        for.
        """
        first = document[0].chunk_id
        if first in self._primed:
            return
        self._primed.add(first)
        self._primer.prime([chunk for chunk in document if self._primer.fits(chunk)])
        unused = tuple(
            chunk.chunk_id for chunk in document if chunk.chunk_id not in self._asked_for
        )
        if unused:
            self.engine.store.evict(RowFilter(chunk_ids=unused))

    def _similar_chunks(self, chunk: Chunk) -> list[Chunk]:
        """Return other documents' first chunks most similar to this one, best first, without an embedding model."""
        firsts = {document[0].chunk_id: document[0] for document in self.dataset.documents}
        firsts.pop(chunk.chunk_id, None)
        similarity = similarities(chunk.text, {name: other.text for name, other in firsts.items()})
        ranked = sorted(firsts, key=lambda name: (-similarity[name], name))
        return [firsts[name] for name in ranked[:CHUNKS_BEFORE]]

    def after(self, question: EvaluationQuestion) -> None:
        """With captures left to the questions (else do nothing), ask this one with the default settings, which capture.

        Call it after every question, also those of the warm-up and those that an earlier run has measured. The answer
        ends with its first piece, and its captures are waited for without limit.
        """
        if not self.condition.is_stream:
            return
        engine = self.engine
        sampling = SamplingParams(max_new_tokens=self.answer_tokens)
        answer = engine.stream(
            question.text, question.passages, sampling=sampling, config=ReuseConfig()
        )
        next(answer, None)
        answer.close()  # prefill captures, so the first token is enough
        captured = [
            engine.prompts.system.segment_id,
            *(chunk.chunk_id for chunk in question.passages),
        ]
        # Looked at by the loop after it has ended the answer and handed over its captures.
        engine.loop.wait_until(lambda: not engine.write_back.pending(captured))
