"""LINGUA2: a trained token classifier keeps the words that matter (LLMLingua-2), through the package `llmlingua`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cachecraft_rag.errors import ConfigError, ModelNotFoundError
from cachecraft_rag.evaluation.compression.base import check_ratio
from cachecraft_rag.types import Chunk

INSTALL = "pip install 'cachecraft-rag[eval-lingua]'"
PUBLISHED = "microsoft/llmlingua-2-xlm-roberta-large-meetingbank"
# The package tells the two kinds of word marks (▁ and ##) by a name that it looks for in the model's.
_FAMILIES = {"xlm-roberta": "xlm-roberta-large", "bert": "bert-base-multilingual-cased"}
_WINDOW, _BATCH = 512, 50  # what the package reads a text in, as it sets them itself


class Lingua2:
    """LLMLingua-2 (Pan et al. 2024, arXiv 2403.12968; Cache-Craft §5.1.4 "LINGUA2").

    In every window of 510 of its own tokens the words with the highest probability of being kept stay, in their order,
    so many that their tokens are `ratio` less one percentage point of the window's. Line ends become spaces, signs may
    get a space before them, and windows are joined without one. So what is left differs a little from that: in 200
    tokens of Markdown and more it was 0.06 below to 0.015 above the ratio; count the tokens when you compare. A chunk
    of a few words may come out empty. The package's own filter of whole chunks is off: every chunk is asked to shrink
    alike. The question is left aside: LLMLingua-2 compresses for any task.

    Args:
        model: Hugging Face name or folder of a LLMLingua-2 classifier; `PUBLISHED` is the one of the paper.
        tokenizer: the answering model's, whose tokens count.
        device: "cpu", "cuda" …

    Raises:
        ConfigError: `llmlingua` is not installed, or the model is no such classifier.
        ModelNotFoundError: nothing of that name can be loaded.
    """

    def __init__(self, model: str, *, tokenizer: Any, device: str = "cpu") -> None:
        self._compressor = _compressor(model, tokenizer=tokenizer, device=device)

    def compress(self, question: str, chunks: Sequence[Chunk], ratio: float) -> tuple[Chunk, ...]:
        """Keep the likeliest words of each chunk; see `Compressor.compress`.

        Raises:
            ConfigError: the ratio is out of range.
        """
        from torch.random import fork_rng

        check_ratio(ratio)
        if ratio == 1 or not chunks:
            return tuple(chunks)
        texts = [chunk.text if self._knows(chunk.text) else "" for chunk in chunks]
        with fork_rng(devices=()):  # torch's DataLoader draws a seed, needed or not
            found = self._compressor.compress_prompt_llmlingua2(texts, rate=ratio)["compressed_prompt_list"]
        return tuple(Chunk(text.strip(), chunk.metadata) for text, chunk in zip(found, chunks, strict=True))

    def _knows(self, text: str) -> bool:
        """Whether there is anything to choose from: the package drops unknown words, and fails where all are."""
        return not self._compressor.special_tokens.issuperset(self._compressor.tokenizer.tokenize(text))


class _WordCounter:
    """Stands in for tiktoken: counts a word of the classifier in the answering model's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of the text; the classifier's mark of a word's beginning is a space."""
        ids: list[int] = self._tokenizer.encode(text.replace("▁", " "), add_special_tokens=False)
        return ids


def _compressor(model: str, *, tokenizer: Any, device: str) -> Any:
    """`llmlingua.PromptCompressor` without what its own constructor does besides.

    That fetches GPT-3.5's tokens from the network (to count in them), seeds the random numbers of the whole process,
    switches cuDNN to deterministic algorithms and runs code that comes with a model. Everything the compression needs
    is set here instead, and the answering model's tokens do the counting.
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
            self.added_tokens: list[str] = []  # stand-ins for words to force, and none is forced
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
    """The name that tells `llmlingua` how the model marks words. Raises as `Lingua2` does."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _not_found(model, error) from error
    classifies = any("ForTokenClassification" in name for name in config.architectures or ())
    if not classifies or config.num_labels != 2 or config.model_type not in _FAMILIES:
        raise ConfigError(
            f"{model!r} ({config.model_type}, {', '.join(config.architectures or ['no architecture'])}, "
            f"{config.num_labels} labels) is no LLMLingua-2 model: that is a BERT or XLM-RoBERTa that tells tokens to "
            f"keep from tokens to drop. Name {PUBLISHED} or one of its kind."
        )
    return _FAMILIES[config.model_type]
