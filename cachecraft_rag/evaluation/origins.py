"""Origin conditions: what chunks were captured behind before a question reuses them.

Under every condition but `stream`, each distinct chunk is captured once, behind chunks that depend on the seed and the
chunk alone. So every method finds the same chunk-caches, also after an interruption.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.prompt.builder import STAND_IN
from cachecraft_rag.serving.priming import Primer
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types import Chunk

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.evaluation.dataset import Dataset, Question

Behind = Callable[["Dataset", "Chunk", int], Sequence["Chunk"]]  # dataset, chunk, seed → what it is captured behind


@dataclass(frozen=True, slots=True)
class OriginCondition:
    """A rule for the origin prefixes of chunks.

    behind  the chunks that a chunk is captured behind: "unrelated", 1 or 2 chunks of other documents; "neighbours", the
            chunks before it in its document; "alone", a fixed passage, as with `prime(alone=True)`. None if captures
            are left to the questions, as in production ("stream")
    """

    name: str
    behind: Behind | None


def _unrelated(dataset: Dataset, chunk: Chunk, seed: int) -> Sequence[Chunk]:
    own = dataset.document_of(chunk.chunk_id)
    others = [other for document in dataset.documents if document is not own for other in document]
    if not others:
        raise ConfigError(
            "the file of questions has only one document, so no chunk in it is unrelated; choose another origin: "
            "neighbours, alone or stream"
        )
    draw = random.Random(f"{seed}/{chunk.chunk_id}")
    return draw.sample(others, min(len(others), draw.randint(1, 2)))


_ALL = (
    OriginCondition("unrelated", _unrelated),
    # `Primer` drops the furthest neighbours if they do not fit into one pass.
    OriginCondition("neighbours", lambda dataset, chunk, _: dataset.neighbours(chunk.chunk_id)),
    OriginCondition("alone", lambda *_: [Chunk(STAND_IN)]),
    OriginCondition("stream", None),
)

CONDITIONS: Mapping[str, OriginCondition] = MappingProxyType({condition.name: condition for condition in _ALL})


def condition_named(name: str) -> OriginCondition:
    """The condition of that name; ConfigError lists the known names."""
    try:
        return CONDITIONS[name]
    except KeyError:
        raise ConfigError(f"unknown origin condition {name!r}; choose one of {', '.join(CONDITIONS)}") from None


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
        self._primer = Primer(self.engine)

    def before(self, question: Question) -> None:
        """Capture the chunks of a question about to be measured; skipped for one that an earlier run has measured."""
        if (behind := self.condition.behind) is not None:
            for chunk in question.passages:
                self._primer.capture(chunk, behind(self.dataset, chunk, self.seed))

    def after(self, question: Question) -> None:
        """With captures left to the questions, ask this one with the default settings, which capture.

        Called after every question, also those of the warm-up and those that an earlier run has measured.
        """
        if self.condition.behind is not None:
            return
        engine = self.engine
        sampling = SamplingParams(max_new_tokens=self.answer_tokens)
        asked = engine.stream(question.text, question.passages, sampling=sampling, config=ReuseConfig())
        next(asked, None)
        asked.close()  # prefill captures, so the first token is enough
        captured = [engine.prompts.system.segment_id, *(chunk.chunk_id for chunk in question.passages)]
        # Looked at by the loop after it has ended the answer and handed over its captures.
        engine.loop.wait_until(lambda: not engine.write_back.pending(captured))
