"""Texts of a foreign database on the command line: `cachecraft prime --from` and `cachecraft store sync --from`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cachecraft_rag.types.documents import chunk_id_of
from tests.cli.conftest import Command

TEXTS = [f"Part {number} of the kettle is cleaned every {number + 2} weeks." for number in range(4)]


def lines(texts: list[str]) -> str:
    return "\n".join(json.dumps({"text": text, "source": "kettle.md"}) for text in texts) + "\n\n"


def stored(cachecraft: Command, home: Path) -> set[str]:
    rows = cachecraft("store", "ls", "--json", cwd=home).result
    return {row["variant"]["key"]["chunk_id"] for row in rows}


def test_texts_of_a_database_are_primed_and_those_it_lost_leave(
    cachecraft: Command, empty_home: Path
) -> None:
    (empty_home / "texts.jsonl").write_text(lines(TEXTS))
    asked = ("prime", "--from", "texts.jsonl", "--json")
    estimate = cachecraft(*asked, "--estimate", cwd=empty_home).result
    assert estimate["captured"] == 0
    assert estimate["estimate"]["captures"] == 6  # the instruction, and the first one twice
    assert cachecraft(*asked, cwd=empty_home).result["captured"] == 6
    again = cachecraft("prime", "--from", "-", "--json", cwd=empty_home, typed=lines(TEXTS))
    assert again.result["captured"] == 0
    assert "0 chunk-caches computed" in cachecraft(*asked[:-1], cwd=empty_home).stdout

    left = lines(TEXTS[:2])
    gone = cachecraft("store", "sync", "--from", "-", "--json", cwd=empty_home, typed=left).result
    assert gone["variants"] >= 2
    assert stored(cachecraft, empty_home) & {chunk_id_of(text) for text in TEXTS[2:]} == set()
    assert chunk_id_of(TEXTS[1]) in stored(cachecraft, empty_home)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("The kettle.", "line 2"),
        ('["a"]', "line 2"),
        ('{"text": 3}', "line 2"),
        ('{"source": "a"}', "line 2"),
        ('{"text": "a", "id": 7}', "id"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_a_line_in_another_form_is_named_before_a_model_is_loaded(
    cachecraft: Command, tmp_path: Path, line: str, said: str
) -> None:
    typed = json.dumps({"text": "a"}) + "\n" + line
    for command in (["prime", "--model", "nothing"], ["store", "sync"]):
        done = cachecraft(*command, "--from", "-", cwd=tmp_path, typed=typed, code=2)
        assert said in done.stderr
        assert '{"text"' in done.stderr


def test_a_program_that_failed_to_list_its_texts_removes_nothing(
    cachecraft: Command, tmp_path: Path
) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    assert (
        "no line"
        in cachecraft("store", "sync", "--from", "-", cwd=tmp_path, typed="\n", code=2).stderr
    )
    for name in ("missing.jsonl", "latin.jsonl", "."):
        done = cachecraft("store", "sync", "--from", name, cwd=tmp_path, code=2)
        assert "cannot be read" in done.stderr
