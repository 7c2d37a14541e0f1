"""From logits to text: what a sampler may draw, and text that comes piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.serving.answer_text import AnswerText
from cachecraft_rag.serving.sampling import Sampler, SamplingParams

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def pieces(
    tokenizer: Any, ids: Sequence[int], stop: Sequence[str] = (), max_new_tokens: int = 1000
) -> tuple[AnswerText, list[str]]:
    """The text after each of these tokens, in order, and the rest of it."""
    answer = AnswerText(
        SamplingParams(max_new_tokens=max_new_tokens, stop=tuple(stop)), tokenizer, end_tokens=()
    )
    parts = []
    for token in ids:
        parts.append(answer.take(token))
        if answer.finish is not None:
            break
    return answer, [*parts, answer.rest()]


def finished(text: str) -> str:
    """The text without a character that it may end in the middle of."""
    return (
        text[: -min(3, len(text) - len(text.rstrip("\ufffd")))] if text.endswith("\ufffd") else text
    )


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


# -- text -------------------------------------------------------------------------------------------------------------


@given(TEXT)
def test_the_pieces_are_the_text(byte_tokenizer: Any, text: str) -> None:
    _, parts = pieces(byte_tokenizer, ids_of(byte_tokenizer, text))
    assert "".join(parts) == finished(text)  # at the end it is taken for half a character


@given(st.lists(st.integers(0, 259), max_size=40))
def test_any_tokens_give_what_decoding_them_at_once_gives(
    byte_tokenizer: Any, ids: list[int]
) -> None:
    _, parts = pieces(byte_tokenizer, ids)  # broken characters and special tokens included
    assert "".join(parts) == finished(decoded(byte_tokenizer, ids))


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_character_that_the_longest_answer_cuts_is_left_out(
    byte_tokenizer: Any, missing: int
) -> None:
    ids = ids_of(byte_tokenizer, "ok \U0001f373")
    answer, parts = pieces(byte_tokenizer, ids[:-missing], max_new_tokens=len(ids) - missing)
    assert answer.finish == "length"
    assert "".join(parts) == "ok "


@given(
    st.lists(
        st.sampled_from(
            ["The", " kettle", "\u2581x", " \U0001f373", "\n\n", "  ", "<|im_end|>", "a", "é"]
        ),
        max_size=8,
    )
)
def test_the_demo_tokenizer_too(demo_tokenizer: Any, words: list[str]) -> None:
    ids = ids_of(demo_tokenizer, "".join(words))
    _, parts = pieces(demo_tokenizer, ids)
    assert "".join(parts) == decoded(demo_tokenizer, ids)


@given(st.lists(st.sampled_from([[0], [1], [2], [3, 4], [5, 6, 7], [8], [9]]), max_size=8))
def test_a_tokenizer_that_drops_the_first_space_and_spells_characters_in_bytes_too(
    words: list[list[int]],
) -> None:
    tokenizer, ids = sentencepiece_like(), [token for word in words for token in word]
    _, parts = pieces(tokenizer, ids)
    assert "".join(parts) == finished(decoded(tokenizer, ids))


def test_a_character_comes_once_it_is_whole(byte_tokenizer: Any) -> None:
    _, parts = pieces(byte_tokenizer, ids_of(byte_tokenizer, "aé\U0001f373b"))
    assert parts == ["a", "", "é", "", "", "", "\U0001f373", "b", ""]


# -- stop strings -----------------------------------------------------------------------------------------------------


def test_a_stop_string_over_several_pieces_ends_the_text_before_it(byte_tokenizer: Any) -> None:
    answer, parts = pieces(
        byte_tokenizer, ids_of(byte_tokenizer, "one\nQuestion: two"), stop=["\nQuestion:"]
    )
    assert answer.finish == "stop"
    assert "".join(parts) == "one"
    assert answer.take(ids_of(byte_tokenizer, "x")[0]) == ""


def test_what_only_begins_like_a_stop_string_is_given_out(byte_tokenizer: Any) -> None:
    answer, parts = pieces(byte_tokenizer, ids_of(byte_tokenizer, "aab aa"), stop=["aaa"])
    assert (answer.finish, "".join(parts)) == ("length", "aab aa")
    assert parts[:3] == ["", "", "aab"]
    assert parts[-1] == "aa"  # held back until the end


@given(
    TEXT,
    st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3),
    st.text("ab\n", max_size=12),
)
def test_the_text_ends_where_the_first_stop_string_would_have_begun(
    byte_tokenizer: Any, text: str, stop: list[str], more: str
) -> None:
    whole = text + more
    answer, parts = pieces(byte_tokenizer, ids_of(byte_tokenizer, whole), stop)
    # Token by token: of two stop strings the one that is complete first counts.
    ends = [(place + len(word), place) for word in stop if (place := whole.find(word)) >= 0]
    first_end = min(ends)[0] if ends else None
    expected = (
        whole
        if first_end is None
        else whole[: min(place for end, place in ends if end == first_end)]
    )
    assert "".join(parts) == expected
    assert answer.finish == ("stop" if ends else "length")


# -- drawing ----------------------------------------------------------------------------------------------------------


def drawn(logits: torch.Tensor, count: int = 300, **settings: Any) -> list[int]:
    sampler = Sampler(SamplingParams(**({"temperature": 1.0, "seed": 0} | settings)))
    return [sampler.draw(logits) for _ in range(count)]


LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def test_without_temperature_the_likeliest_token_is_drawn() -> None:
    assert set(drawn(LOGITS.flip(0), temperature=0.0, seed=None)) == {3}


@pytest.mark.parametrize(
    ("top_p", "allowed"),
    [(0.01, {0}), (0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})],
)
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(
    top_p: float, allowed: set[int]
) -> None:
    assert set(drawn(LOGITS, top_p=top_p - 1e-4 if top_p == 0.8 else top_p)) == allowed


def test_draws_follow_the_shares_and_the_temperature() -> None:
    shares = torch.bincount(torch.tensor(drawn(LOGITS, count=4000)), minlength=4) / 4000
    assert torch.allclose(shares, LOGITS.exp(), atol=0.03)
    cold = drawn(LOGITS, count=1000, temperature=0.2)
    assert cold.count(0) > 900


@pytest.mark.parametrize("temperature", [1e-6, 1e-40])
def test_hardly_any_temperature_is_the_likeliest_token(temperature: float) -> None:
    assert set(drawn(LOGITS * 100, temperature=temperature, count=20)) == {0}


def test_a_seed_draws_the_same_again() -> None:
    assert drawn(LOGITS, seed=1) == drawn(LOGITS, seed=1)
    assert drawn(LOGITS, seed=1) != drawn(LOGITS, seed=2)
    assert drawn(LOGITS, seed=None) != drawn(LOGITS, seed=None)


def test_half_precision_logits_are_drawn_from_too() -> None:
    assert set(drawn(LOGITS.to(torch.bfloat16), top_p=0.9)) <= {0, 1, 2}


# -- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(demo_model))


def sentencepiece_like() -> Any:
    """Llama 2's kind: spaces stand in tokens, the text's first one is dropped, and rare characters are bytes."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = [
        "\u2581the",
        "\u2581kettle",
        "s",
        "<0xC3>",
        "<0xA9>",
        "<0xE2>",
        "<0x82>",
        "<0xAC>",
        "\u2581",
    ]
    backend = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="s")
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert tokenizer.eos_token_id == len(words)
    return tokenizer
