"""What prompts in the forms of common applications reuse, by the search alone."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.prompt_forms import FORMS, orders

GOAL = 0.75  # of the passages' tokens


def test_each_form_reuses_its_passages_from_the_third_time_on() -> None:
    done = CliRunner().invoke(app, ["prompt-forms", "--json"])
    assert done.exit_code == 0, done.output
    shares = json.loads(done.output)
    assert shares.keys() == FORMS.keys()
    for name, by_time in shares.items():
        assert by_time[:2] == [0, 0], name
        assert min(by_time[2:]) >= GOAL, name


def test_each_time_has_an_order_of_its_own() -> None:
    made = orders(["a", "b", "c", "d", "e"], 3, seed=0)
    assert made == orders(["a", "b", "c", "d", "e"], 3, seed=0)
    assert len({tuple(order) for order in made}) == 3
