"""MAPREDUCE: the answering model summarises each chunk (map) and answers over the summaries (reduce)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.engine.sampling import SamplingParams
from cachecraft_rag.errors import ContextLengthError
from cachecraft_rag.evaluation.compression.base import check_ratio, token_budget
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.types import Chunk

INSTRUCTION = "Summarize the context in at most {words} words. Keep names, numbers and other facts."
WORDS_PER_TOKEN = 0.75  # of English text: models follow a limit in words better than one in tokens


class MapReduce:
    """Summaries by the model that answers (Cache-Craft §5.1.4 "MAPREDUCE"), greedy, one chunk at a time.

    A compressed chunk has at most `token_budget` tokens, counted as in the prompt, with the empty line at its end. A
    shorter chunk stays as it is. A summary may be shorter than the budget, even empty. The question is ignored, as in
    the paper.

    Args:
        engine: with the answering model. Chunks are computed in full and nothing is captured.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def compress(self, question: str, chunks: Sequence[Chunk], ratio: float) -> tuple[Chunk, ...]:
        """Summarise each chunk in at most `ratio` of its tokens; see `Compressor.compress`.

        Raises:
            ConfigError: the ratio is out of range.
            ContextLengthError: a chunk and its summary do not fit into the model's context.
        """
        check_ratio(ratio)
        return tuple(self._summarise(chunk, token_budget(self._tokens(chunk.text), ratio)) for chunk in chunks)

    def _summarise(self, chunk: Chunk, budget: int) -> Chunk:
        if self._tokens(chunk.text) <= budget:
            return chunk
        generation = self._engine.stream(
            INSTRUCTION.format(words=max(1, int(budget * WORDS_PER_TOKEN))),
            [chunk],
            sampling=SamplingParams(max_new_tokens=budget),
            config=ReuseConfig(reuse=False, capture=False),
        )
        for _ in generation:
            pass
        if any(of.outcome == "trimmed" for of in generation.stats.chunks):
            raise ContextLengthError(
                f"a chunk of {self._tokens(chunk.text)} tokens and its summary do not fit the model's context. Make "
                "the chunks smaller."
            )
        return Chunk(self._cut(generation.text.strip(), budget), chunk.metadata)

    def _cut(self, text: str, budget: int) -> str:
        """The longest prefix within the budget: read as a chunk, text has other tokens than when it was generated."""
        if self._tokens(text) <= budget:
            return text
        lengths = range(len(text) + 1)
        fitting = bisect_right(lengths, budget, key=lambda length: self._tokens(text[:length]))
        return text[: max(0, fitting - 1)]

    def _tokens(self, text: str) -> int:
        return len(self._engine.prompts.chunk_segment(Chunk(text)).token_ids)
