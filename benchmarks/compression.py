"""Prompt compressors, which shorten passages instead of reusing their caches: baselines (Cache-Craft §5.1.4).

The paper compares compression with reuse at equal cost: 80 % compression corresponds to 20 % recomputation. So `ratio`
here is the share of the chunks' tokens to keep, comparable with a recompute ratio of the same value. A compressor gives
the same chunks in the same order, each with a shorter text; its time counts, and full prefill answers over the result.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, ContextLengthError, ModelNotFoundError
from cachecraft_rag.evaluation.measuring import Preparation
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.documents import Chunk

if TYPE_CHECKING:
    from cachecraft_rag.evaluation.dataset import EvaluationQuestion

MIN_TOKENS = 4  # the smallest budget of a chunk: fewer tokens say nothing


def check_ratio(ratio: float) -> None:
    """Raise ConfigError unless `ratio` lies above 0 and at most at 1."""
    if not 0 < ratio <= 1:
        raise ConfigError(
            f"a compression ratio is the share to keep, above 0 and at most 1, not {ratio}"
        )


def token_budget(tokens: int, ratio: float) -> int:
    """⌈ratio · tokens⌉, the most tokens a compressed chunk may have; never below `MIN_TOKENS`.

    >>> token_budget(200, 0.15), token_budget(201, 0.15), token_budget(10, 0.15)
    (30, 31, 4)
    """
    # 0.15 · 20 is a little above 3 in binary
    return max(MIN_TOKENS, math.ceil(ratio * tokens - 1e-9))


def preparation(make: Callable[[Engine], Lingua2 | MapReduce]) -> Preparation:
    """Answer over passages that a compressor has shortened. It is made once, for the first engine."""
    made: list[Lingua2 | MapReduce] = []

    def prepare(engine: Engine, question: EvaluationQuestion, ratio: float) -> Any:
        if not made:
            made.append(make(engine))
        return shortened(made[0], question, ratio)

    return prepare


@contextmanager
def shortened(
    compressor: Lingua2 | MapReduce, question: EvaluationQuestion, ratio: float
) -> Iterator[Sequence[Chunk]]:
    """The passages that still hold text."""
    yield [
        chunk
        for chunk in compressor.compress(question.text, question.passages, ratio)
        if chunk.text.strip()
    ]


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
        """Summarise each chunk in at most `ratio` of its tokens.

        Raises:
            ConfigError: the ratio is out of range.
            ContextLengthError: a chunk and its summary do not fit into the model's context.
        """
        check_ratio(ratio)
        return tuple(
            self._summarise(chunk, token_budget(self._tokens(chunk.text), ratio))
            for chunk in chunks
        )

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


INSTALL = "pip install 'cachecraft-rag[bench]'"
PUBLISHED = "microsoft/llmlingua-2-xlm-roberta-large-meetingbank"
# The package recognises the two kinds of word marks (▁ and ##) by these names inside the model's name.
_FAMILIES = {"xlm-roberta": "xlm-roberta-large", "bert": "bert-base-multilingual-cased"}
_WINDOW, _BATCH = 512, 50  # tokens per window and windows per batch: the package's own values


class Lingua2:
    """LLMLingua-2 (Pan et al. 2024, arXiv 2403.12968; Cache-Craft §5.1.4 "LINGUA2").

    In every window of 510 of its own tokens it keeps the most probable words, in their order, up to a share of `ratio`
    minus one percentage point of the window's tokens. Line ends become spaces, punctuation may get a space before it,
    and windows are joined without a space. So the result differs a little from the ratio: for 200 tokens of Markdown or
    more it was between 0.06 below and 0.015 above. Count the tokens when you compare. A chunk of a few words may come
    out empty. The package's filter of whole chunks is off, so that every chunk shrinks alike. The question is ignored:
    LLMLingua-2 compresses for any task.

    Args:
        model: Hugging Face name or folder of an LLMLingua-2 classifier; `PUBLISHED` is the paper's.
        tokenizer: of the answering model; tokens are counted with it.
        device: "cpu", "cuda" …

    Raises:
        ConfigError: `llmlingua` is not installed, or the model is not such a classifier.
        ModelNotFoundError: no model of that name can be loaded.
    """

    def __init__(self, model: str, *, tokenizer: Any, device: str = "cpu") -> None:
        self._compressor = _compressor(model, tokenizer=tokenizer, device=device)

    def compress(self, question: str, chunks: Sequence[Chunk], ratio: float) -> tuple[Chunk, ...]:
        """Keep the most probable words of each chunk.

        Raises:
            ConfigError: the ratio is out of range.
        """
        from torch.random import fork_rng

        check_ratio(ratio)
        if ratio == 1 or not chunks:
            return tuple(chunks)
        texts = [chunk.text if self._knows(chunk.text) else "" for chunk in chunks]
        with fork_rng(devices=()):  # torch's DataLoader always draws a seed
            found = self._compressor.compress_prompt_llmlingua2(texts, rate=ratio)[
                "compressed_prompt_list"
            ]
        return tuple(
            Chunk(text.strip(), chunk.metadata) for text, chunk in zip(found, chunks, strict=True)
        )

    def _knows(self, text: str) -> bool:
        """True if the text has a known word: the package drops unknown words, and fails if nothing is left."""
        return not self._compressor.special_tokens.issuperset(
            self._compressor.tokenizer.tokenize(text)
        )


class _WordCounter:
    """Replaces tiktoken: counts a word of the classifier in tokens of the answering model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of the text; the classifier's word mark is replaced by a space."""
        ids: list[int] = self._tokenizer.encode(text.replace("▁", " "), add_special_tokens=False)
        return ids


def _compressor(model: str, *, tokenizer: Any, device: str) -> Any:
    """`llmlingua.PromptCompressor` without the side effects of its constructor.

    The constructor downloads GPT-3.5's tokens (to count in them), seeds the random numbers of the whole process,
    switches cuDNN to deterministic algorithms and runs code that comes with a model. This one sets only the attributes
    that compression needs, and counts in tokens of the answering model.
    """
    try:
        from llmlingua import PromptCompressor
    except ImportError as error:
        raise ConfigError(f"LINGUA2 needs the package llmlingua ({error}): {INSTALL}") from error
    family = _family(model)

    class Quiet(PromptCompressor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.model_name = family
            self.use_llmlingua2, self.use_slingua = True, False
            self.oai_tokenizer = _WordCounter(tokenizer)
            self.max_batch_size, self.max_seq_len = _BATCH, _WINDOW
            self.max_force_token = 0
            self.added_tokens: list[str] = []  # placeholders for forced words; there are none
            self.load_model(model, device, {"trust_remote_code": False})
            self.special_tokens = set(self.tokenizer.all_special_tokens)

    try:
        return Quiet()
    except (OSError, ValueError) as error:
        raise _not_found(model, error) from error


def _not_found(model: str, error: Exception) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"cannot load the model {model!r}: {error}\nName {PUBLISHED} or a folder that holds such a model."
    )


def _family(model: str) -> str:
    """The name by which `llmlingua` knows how the model marks words. Raises as `Lingua2` does."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _not_found(model, error) from error
    classifies = any("ForTokenClassification" in name for name in config.architectures or ())
    if not classifies or config.num_labels != 2 or config.model_type not in _FAMILIES:
        raise ConfigError(
            f"{model!r} ({config.model_type}, {', '.join(config.architectures or ['no architecture'])}, "
            f"{config.num_labels} labels) is no LLMLingua-2 model, which is a BERT or XLM-RoBERTa that classifies "
            f"tokens into keep and drop. Name {PUBLISHED} or a model of that kind."
        )
    return _FAMILIES[config.model_type]
