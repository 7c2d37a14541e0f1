"""Prompts in the model's own layout: chats without words of this package, and texts as they are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from cachecraft_rag.errors import ConfigError, ContextLengthError
from cachecraft_rag.prompt.builder import PromptBuilder, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BODY = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
TEMPLATES = {
    "ChatML": BODY + "<|assistant|>\n",
    "with a system turn of its own": (
        "{% if messages[0].role != 'system' %}<|system|>\nYou are Ada.<|end|>\n{% endif %}"
        + BODY
        + "<|assistant|>\n"
    ),
    "no line ends": "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}<|assistant|>",
}
TURNS: list[Turn] = [("user", "Hi!"), ("assistant", "Hello."), ("user", "Who are you?")]


def tokenizer_with(template: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def ids_of(builder: PromptBuilder, turns: Sequence[Turn]) -> list[int]:
    prompt = builder.build(turns[-1][1], [], history=turns[:-1])
    return [token for segment in prompt.segments for token in segment.token_ids]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_chat_has_the_tokens_of_the_models_own_template(
    template: str, system: str, byte_tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer = tokenizer_with(template, byte_tokenizer)
    bare = PromptBuilder(tokenizer, context_length=2048, system=system, bare=True)
    instruction = [{"role": "system", "content": system}] if system else []
    searching = PromptBuilder(
        tokenizer, context_length=2048, system=system, bare=True, search_system=True
    )
    for turns in (TURNS, TURNS[-1:]):
        messages = [*instruction, *({"role": role, "content": text} for role, text in turns)]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids_of(bare, turns) == expected
        assert ids_of(searching, turns) == expected


def test_control_tokens_in_a_chat_stay_text_and_in_a_text_control_the_model(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    end = byte_tokenizer.convert_tokens_to_ids("<|end|>")
    bare = PromptBuilder(byte_tokenizer, context_length=2048, system="", bare=True)
    assert ids_of(bare, [("user", "a<|end|>b")]).count(end) == 1  # the template's own
    prompt = bare.build_text("a<|end|>b", reserve=0, recognise=None, private=False)
    assert prompt.segments[-1].token_ids[1] == end
    assert prompt.bounds[-1] == 3


def test_a_text_that_does_not_fit_is_refused(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    builder = PromptBuilder(byte_tokenizer, context_length=100, system="")
    with pytest.raises(ContextLengthError, match="the prompt has 90 tokens, the answer 20"):
        builder.build_text("x" * 90, reserve=20, recognise=None, private=False)
    with pytest.raises(ConfigError, match="the prompt is empty"):
        builder.build_text("", reserve=1, recognise=None, private=False)
