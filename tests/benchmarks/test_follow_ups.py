"""Follow-up questions: hit rates on the shipped set and on a user's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.follow_ups import (
    WAYS,
    FollowUp,
    HitRates,
    handbook_retriever,
    hit_rates,
    read_follow_ups,
)
from cachecraft_rag.cli.app import app
from cachecraft_rag.errors import ConfigError, DocumentError
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.retriever import Retriever

pytestmark = pytest.mark.usefixtures("as_loud_as_before")


@pytest.fixture(scope="module")
def handbook_index() -> Iterator[Retriever]:
    with handbook_retriever(Embedder()) as retriever:
        yield retriever


@pytest.fixture(scope="module")
def rates(handbook_index: Retriever) -> dict[str, HitRates]:
    """The hit rates of each way on the shipped follow-ups."""
    return {one.way: one for one in hit_rates(handbook_index, read_follow_ups(), top_k=5)}


# --- what is found ---


def test_follow_ups_are_found_as_often_as_the_questions_written_out(
    rates: dict[str, HitRates],
) -> None:
    alone, together, in_full = (rates[way] for way in WAYS)
    assert alone.at(5) <= 0.75
    assert together.at(5) >= 0.9
    assert together.at(5) >= in_full.at(5)
    assert together.at(3) >= 0.9


def test_a_change_of_subject_loses_nothing(rates: dict[str, HitRates]) -> None:
    """Follow-ups that are whole questions about something else: the conversation must not drown them."""
    changed = [
        place for place, one in enumerate(read_follow_ups()) if one.question == one.standalone
    ]
    assert len(changed) >= 4
    assert all(rates["with its conversation"].ranks[place] for place in changed)


def test_the_shipped_follow_ups_are_of_every_kind() -> None:
    shipped = read_follow_ups()
    assert len(shipped) == len({(one.history, one.question) for one in shipped}) == 40
    assert sum(len(one.history) > 2 for one in shipped) >= 4
    assert all(one.history[0][0] == "user" and one.history[-1][0] == "assistant" for one in shipped)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"conversation": ["a"], "question": "b", "standalone": "c", "expect": "d"}', "1 texts"),
        (
            '{"conversation": ["a", "b"], "question": "b", "standalone": "c", "expect": "("}',
            "no regular expression",
        ),
        ('{"conversation": ["a", "b"], "question": "b", "standalone": "c"}', '"expect" is missing'),
    ],
)
def test_a_wrong_record_is_named(tmp_path: Path, record: str, message: str) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(f"{record}\n", encoding="utf-8")
    with pytest.raises(DocumentError, match=message):
        read_follow_ups(path)


def test_a_follow_up_that_no_chunk_answers_is_an_error(handbook_index: Retriever) -> None:
    impossible = FollowUp(
        (("user", "How often?"), ("assistant", "Weekly.")),
        "And?",
        "And?",
        re.compile("no page says this"),
    )
    with pytest.raises(DocumentError, match="no chunk of the index"):
        hit_rates(handbook_index, [impossible], top_k=5)


def test_the_command_needs_no_answering_model(
    benchmark_json: Callable[..., Any], benchmark_output: Callable[..., str]
) -> None:
    report = benchmark_json("follow-ups")
    assert report["questions"] == 40
    rates = report["hit_rate"]
    assert rates["the question alone"]["5"] <= 0.75
    assert rates["with its conversation"]["5"] >= 0.9
    assert rates["with its conversation"]["5"] >= rates["written out in full"]["5"]
    assert len(report["ranks"]["with its conversation"]) == 40
    shown = benchmark_output("follow-ups", "--top-k", "3")
    assert re.search(r"with its conversation +0\.\d\d +0\.\d\d", shown)
    assert "hit rate at 5" not in shown


def test_follow_ups_about_your_own_documents(
    tmp_path: Path, benchmark_json: Callable[..., Any]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "kettle.md").write_text(
        "Descaling the kettle takes 20 minutes.", encoding="utf-8"
    )
    record = {
        "conversation": ["How often is it descaled?", "Weekly."],
        "question": "And how long does it take?",
    }
    record |= {"standalone": "How long does descaling take?", "expect": "20 minutes"}
    (tmp_path / "asked.jsonl").write_text(json.dumps(record), encoding="utf-8")
    store, data = str(tmp_path / "store"), str(tmp_path / "asked.jsonl")
    CliRunner().invoke(
        app, ["index", str(tmp_path / "docs"), "--store", store], catch_exceptions=False
    )
    report = benchmark_json("follow-ups", "--data", data, "--store", store)
    assert report["ranks"] == {way: [1] for way in report["ranks"]}
    with pytest.raises(ConfigError, match="both --data and --store"):
        benchmark_json("follow-ups", "--data", data)
