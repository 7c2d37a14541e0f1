"""Prompt compression: the budgets are kept, the chunks stay in place, and each method does what its name says."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.compression import MIN_TOKENS, Lingua2, MapReduce, _WordCounter, token_budget
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, ContextLengthError, ModelNotFoundError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import Chunk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MakeDecoder = Callable[..., Decoder]

QUESTION = "When was the mill built?"
SENTENCES = [
    "The mill of Arden was built in 1701 and stands beside the river, on the left bank.",
    "Its wheel turned until the flood of 1838; since then the building has been a school, then a library.",
    "Visitors may climb to the loft on Sundays between ten and four, except in winter.",
    "The bridge next to it is older: it carried the road to Brook long before anyone thought of a mill.",
    "A guide in the ticket office lends umbrellas, maps and a key to the small museum behind the yard.",
    "Every spring the miller's guild opens the sluice and grinds two sacks of rye in front of the town.",
]
CHUNKS = [
    Chunk(" ".join(SENTENCES[:4]), {"source": "arden.md"}),
    Chunk("Short.", {"source": "short.md"}),
    Chunk(" ".join(SENTENCES[3:]), {"source": "brook.md"}),
    Chunk(SENTENCES[1]),
]
RATIOS = [0.15, 0.3, 0.7]


def test_the_budget_is_the_share_rounded_up_and_never_nothing() -> None:
    # 0.15 · 20 is 3.0000000000000004
    assert [token_budget(20, ratio) for ratio in (0.15, 0.3, 1.0)] == [4, 6, 20]
    assert token_budget(100, 0.301) == 31
    assert token_budget(0, 0.5) == token_budget(1, 1.0) == MIN_TOKENS


# MAPREDUCE


@pytest.fixture
def engine(tiny_decoder: MakeDecoder, store: ChunkCacheStore) -> Iterator[Engine]:
    with Engine(tiny_decoder("Llama"), store) as made:
        yield made


def tokens(engine: Engine, chunk: Chunk) -> int:
    """Number of tokens of a chunk in a prompt."""
    return len(engine.prompts.chunk_segment(chunk).token_ids)


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_summary_keeps_the_budget_and_its_place(
    engine: Engine, store: ChunkCacheStore, ratio: float
) -> None:
    summaries = MapReduce(engine).compress(QUESTION, CHUNKS, ratio)
    assert [chunk.metadata for chunk in summaries] == [chunk.metadata for chunk in CHUNKS]
    for before, after in zip(CHUNKS, summaries, strict=True):
        # a random model writes bytes that are no text, each of which is three when it is read again
        assert tokens(engine, after) <= token_budget(tokens(engine, before), ratio)
    assert all(after.text != before.text for before, after in zip(CHUNKS, summaries, strict=True))
    assert MapReduce(engine).compress("Another question?", CHUNKS, ratio) == summaries
    engine.write_back.wait_for([chunk.chunk_id for chunk in CHUNKS])
    assert store.stats().variants == 0  # no chunk-cache was captured


def test_a_summary_is_the_answering_models_own_greedy_text(engine: Engine) -> None:
    chunk, ratio = CHUNKS[0], 0.5
    budget = token_budget(tokens(engine, chunk), ratio)
    instruction = f"Summarize the context in at most {int(budget * 0.75)} words. Keep names, numbers and other facts."
    own = engine.stream(
        instruction,
        [chunk],
        sampling=SamplingParams(max_new_tokens=budget),
        config=ReuseConfig(reuse=False, capture=False),
    )
    written = "".join(own).strip()
    (summary,) = MapReduce(engine).compress(QUESTION, [chunk], ratio)
    assert summary.text
    assert written.startswith(summary.text)
    if len(summary.text) < len(written):  # cut, and no more than it must be
        longer = written[: len(summary.text) + 1]
        assert tokens(engine, Chunk(longer)) > budget


def test_a_text_within_its_budget_is_unchanged(engine: Engine) -> None:
    method = MapReduce(engine)
    assert method.compress(QUESTION, CHUNKS, 1.0) == tuple(CHUNKS)
    assert method.compress(QUESTION, [], 0.2) == ()
    tiny = Chunk("ab")  # two letters and an empty line: MIN_TOKENS
    assert tokens(engine, tiny) == MIN_TOKENS
    assert method.compress(QUESTION, [tiny], 0.1) == (tiny,)


def test_a_chunk_too_long_for_the_compressor_is_reported(
    tiny_decoder: MakeDecoder, store: ChunkCacheStore
) -> None:
    with Engine(tiny_decoder("Llama", max_position_embeddings=512), store) as engine:
        method = MapReduce(engine)
        with pytest.raises(ContextLengthError, match=r"chunk of 602 tokens .* smaller"):
            method.compress(QUESTION, [Chunk("x" * 600)], 0.1)


@pytest.mark.slow
def test_the_demo_model_summarises_and_answers(
    demo_model: Path, handbook: Path, store: ChunkCacheStore
) -> None:
    chunk = Chunk((handbook / "welcome.md").read_text(encoding="utf-8")[:1500])
    with Engine(Decoder.load("demo", dtype="float32"), store) as engine:
        (summary,) = MapReduce(engine).compress(QUESTION, [chunk], 0.3)
        budget = token_budget(tokens(engine, chunk), 0.3)
        assert 10 <= tokens(engine, summary) <= budget
        words = {word.strip(".,").lower() for word in summary.text.split() if len(word) > 4}
        known = [word for word in words if word in chunk.text.lower()]
        assert len(known) >= len(words) / 2, summary.text  # about this chunk
        answer = engine.stream(
            "What is this about?",
            [summary],
            sampling=SamplingParams(max_new_tokens=8),
            config=ReuseConfig(reuse=False),
        )
        assert "".join(answer)
        assert answer.stats.tokens_prompt < tokens(engine, chunk)


# LINGUA2


def tiny_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Short words whole and long ones in letters, marked as the family marks them: ## inside a word, or ▁ before one.

    Not trained: the trainers of `tokenizers` break ties differently each time.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(set("".join(SENTENCES)) - {" "})
    short = sorted({word for word in words_of(" ".join(SENTENCES)) if 1 < len(word) <= 5})
    if family == "bert":
        names = {
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
        }
        pieces = [*names.values(), *letters, *(f"##{letter}" for letter in letters), *short]
        backend = Tokenizer(
            models.WordPiece(
                {piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]"
            )
        )
        backend.normalizer = normalizers.BertNormalizer(lowercase=False)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
    else:
        names = {
            "cls_token": "<s>",
            "pad_token": "<pad>",
            "sep_token": "</s>",
            "unk_token": "<unk>",
        }
        scored = [(name, 0.0) for name in names.values()]
        scored += [(letter, -10.0) for letter in ("▁", *letters)] + [
            (f"▁{word}", -5.0) for word in short
        ]
        backend = Tokenizer(models.Unigram(scored, unk_id=3))
        backend.normalizer = normalizers.Replace("\n", " ")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.WhitespaceSplit(),
                pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always"),
            ]
        )
        backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    first, last = names["cls_token"], names["sep_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        special_tokens=[(name, backend.token_to_id(name)) for name in (first, last)],
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def save_classifier(folder: Path, family: str, **settings: Any) -> Path:
    """A tiny random LLMLingua-2 model of a family, in the form of the published ones."""
    import torch
    import transformers

    tokenizer = tiny_tokenizer(family)
    kind = {"bert": "Bert", "xlm-roberta": "XLMRoberta"}[family]
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 514,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.5,  # the usual 0.02 would find every word alike
    }
    config = getattr(transformers, f"{kind}Config")(**(shape | settings))
    torch.manual_seed(1)
    getattr(transformers, f"{kind}ForTokenClassification")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["bert", "xlm-roberta"])
def classifier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny LLMLingua-2 model."""
    return save_classifier(tmp_path_factory.mktemp("classifier"), request.param)


@pytest.fixture
def lingua(classifier: Path, byte_tokenizer: PreTrainedTokenizerFast) -> Lingua2:
    return Lingua2(str(classifier), tokenizer=byte_tokenizer)


def words_of(text: str) -> list[str]:
    """Words and signs, without the spaces that the two families put around signs."""
    return re.findall(r"\w+|[^\w\s]", text)


def is_subsequence(some: list[str], all_of_them: list[str]) -> bool:
    rest = iter(all_of_them)
    return all(word in rest for word in some)


@pytest.mark.parametrize("ratio", RATIOS)
def test_words_are_left_out_and_none_changed_or_moved(
    lingua: Lingua2, byte_tokenizer: PreTrainedTokenizerFast, ratio: float
) -> None:
    kept = lingua.compress(QUESTION, CHUNKS, ratio)
    assert [chunk.metadata for chunk in kept] == [chunk.metadata for chunk in CHUNKS]
    for before, after in zip(CHUNKS, kept, strict=True):
        assert is_subsequence(words_of(after.text), words_of(before.text)), after.text
        length, left = (len(byte_tokenizer.encode(chunk.text)) for chunk in (before, after))
        assert left <= ratio * length + 2
        if length > 100:
            assert left >= (ratio - 0.05) * length
    assert lingua.compress("Another question?", CHUNKS, ratio) == kept


def test_the_words_that_stay_are_the_likeliest(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    import torch
    from transformers import BertForTokenClassification

    model = BertForTokenClassification.from_pretrained(
        save_classifier(tmp_path / "classifier", "bert")
    )
    tokenizer, text = tiny_tokenizer("bert"), SENTENCES[0]
    with torch.inference_mode():
        shares = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)[1:-1, 1]
    likely: list[list[float]] = []  # of each word: the probability of its tokens
    for token, share in zip(tokenizer.tokenize(text), shares.tolist(), strict=True):
        if token.startswith("##"):
            likely[-1].append(share)
        else:
            likely.append([share])
    words = [(sum(of) / len(of), word) for of, word in zip(likely, words_of(text), strict=True)]
    method = Lingua2(str(tmp_path / "classifier"), tokenizer=byte_tokenizer)
    (kept,) = method.compress(QUESTION, [Chunk(text)], 0.4)
    count = len(words_of(kept.text))
    threshold = sorted(words, reverse=True)[count - 1]
    assert words_of(kept.text) == [word for share, word in words if (share, word) >= threshold]
    assert 3 <= count < len(words)


def test_the_package_set_up_by_itself_keeps_the_same_words(
    classifier: Path,
    byte_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import llmlingua
    import tiktoken
    import torch

    # Its constructor would load GPT-3.5's tokens from the network, and changes these:
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda _: _WordCounter(byte_tokenizer))
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", torch.backends.cudnn.deterministic)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    config = json.loads((classifier / "config.json").read_text(encoding="utf-8"))
    named = (
        tmp_path
        / {"bert": "bert-base-multilingual-cased", "xlm-roberta": "xlm-roberta-large"}[
            config["model_type"]
        ]
    )
    named.symlink_to(classifier)
    own = llmlingua.PromptCompressor(str(named), use_llmlingua2=True, device_map="cpu")
    found = own.compress_prompt(
        [chunk.text for chunk in CHUNKS], rate=0.4, use_context_level_filter=False
    )
    kept = Lingua2(str(classifier), tokenizer=byte_tokenizer).compress(QUESTION, CHUNKS, 0.4)
    assert [chunk.text for chunk in kept] == [
        text.strip() for text in found["compressed_prompt_list"]
    ]


def test_chunks_with_nothing_to_choose_from(lingua: Lingua2) -> None:
    assert lingua.compress(QUESTION, CHUNKS, 1.0) == tuple(CHUNKS)
    assert lingua.compress(QUESTION, [], 0.5) == ()
    kept = lingua.compress(QUESTION, [Chunk(""), Chunk("\n \n"), Chunk("♖♘♗"), CHUNKS[0]], 0.5)
    assert [chunk.text for chunk in kept[:3]] == ["", "", ""]
    # a chunk's neighbours change nothing
    assert kept[3] == lingua.compress(QUESTION, [CHUNKS[0]], 0.5)[0]


def test_a_text_of_several_windows_is_shortened_in_each(
    lingua: Lingua2, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    text = " ".join(SENTENCES * 6)
    assert len(lingua._compressor.tokenizer.tokenize(text)) > 2 * 510
    (kept,) = lingua.compress(QUESTION, [Chunk(text)], 0.3)
    # by letters: the package puts no space between windows
    assert is_subsequence(list(kept.text.replace(" ", "")), list(text))
    length = len(byte_tokenizer.encode(text))
    assert 0.25 * length <= len(byte_tokenizer.encode(kept.text)) <= 0.3 * length + 2


def test_it_leaves_the_process_as_it_was(
    classifier: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    import numpy as np
    import torch

    def state() -> tuple[object, ...]:
        cudnn = torch.backends.cudnn
        drawn = random.getstate(), torch.get_rng_state().tolist(), str(np.random.get_state())
        return drawn, cudnn.deterministic, cudnn.benchmark, dict(os.environ)

    random.seed(7)
    before = state()
    Lingua2(str(classifier), tokenizer=byte_tokenizer).compress(QUESTION, CHUNKS, 0.5)
    assert state() == before


# Errors


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01, float("nan")])
def test_a_ratio_out_of_range_is_refused(engine: Engine, lingua: Lingua2, ratio: float) -> None:
    methods: list[MapReduce | Lingua2] = [MapReduce(engine), lingua]
    for method in methods:
        with pytest.raises(ConfigError, match="above 0 and at most 1"):
            method.compress(QUESTION, CHUNKS, ratio)


def test_a_missing_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    monkeypatch.setitem(sys.modules, "llmlingua", None)  # importing it now fails
    with pytest.raises(ConfigError, match=re.escape("pip install 'cachecraft-rag[bench]'")):
        Lingua2("any", tokenizer=byte_tokenizer)


def test_a_missing_model_names_the_published_one(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ModelNotFoundError, match="Name microsoft/llmlingua-2"):
        Lingua2(str(tmp_path / "nowhere"), tokenizer=byte_tokenizer)
    folder = save_classifier(tmp_path / "damaged", "bert")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="Name microsoft/llmlingua-2"):
        Lingua2(str(folder), tokenizer=byte_tokenizer)


def test_a_model_of_another_kind_is_refused(
    tmp_path: Path, tiny_decoder: MakeDecoder, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tiny_decoder("Llama").model.save_pretrained(tmp_path / "llama")
    save_classifier(tmp_path / "labels", "bert", num_labels=5)
    for name in ("llama", "labels"):
        with pytest.raises(
            ConfigError, match=f"{name}.*is no LLMLingua-2 model.* Name microsoft/llmlingua-2"
        ):
            Lingua2(str(tmp_path / name), tokenizer=byte_tokenizer)
