"""What prompts in the forms of common applications reuse, by the search alone."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.prompt_forms import FORMS, handbook_passages, orders, searched
from cachecraft_rag.model.demo_model import demo_model_folder
from cachecraft_rag.planning.found_text import TokenKinds

GOAL = 0.75  # of the passages' tokens


@pytest.mark.parametrize("passages", [5, 8])  # 5: prompts of 1,100 to 1,500 tokens
def test_each_form_reuses_its_passages_from_the_third_time_on(passages: int) -> None:
    done = CliRunner().invoke(app, ["prompt-forms", "--passages", str(passages), "--json"])
    assert done.exit_code == 0, done.output
    shares = json.loads(done.output)
    assert shares.keys() == FORMS.keys()
    for name, by_time in shares.items():
        assert by_time[:2] == [0, 0], name
        assert min(by_time[2:]) >= GOAL, name


def test_short_paragraphs_are_reused_too() -> None:
    """Each form with its own pages, some of which have paragraphs of fifty tokens between longer ones."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(demo_model_folder()))
    kinds = TokenKinds.of(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    pages = handbook_passages(5 * len(FORMS))
    for number, (name, form) in enumerate(FORMS.items()):
        own = pages[5 * number : 5 * number + 5]
        shares = searched(form, orders(own, 4, seed=0), "What?", tokenizer, kinds).shares
        assert min(shares[2:]) >= 0.8, name


def test_each_time_has_an_order_of_its_own() -> None:
    made = orders(["a", "b", "c", "d", "e"], 3, seed=0)
    assert made == orders(["a", "b", "c", "d", "e"], 3, seed=0)
    assert len({tuple(order) for order in made}) == 3
