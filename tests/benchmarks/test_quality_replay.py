"""Streams with a quality target, replayed from answers that are given once with each ratio."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.quality_replay import Answers, answer_at, compare, measure, read_table, replay
from benchmarks.quality_target import AuditedAnswer, StreamSettings, agreement_of
from benchmarks.quality_target import measure as measure_stream
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import Dataset
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.types.progress import Progress

RATIOS = (0.15, 0.6)


def table_line(answers: dict[str, list[float]]) -> str:
    """A line of a table, with tokens, agreeing tokens and recomputed share by ratio."""
    row = {"question": "a digest", "model": "a model", "answer_tokens": 16, "answers": answers}
    return f"{json.dumps(row)}\n"


def fill(
    table: Path,
    decoder: Decoder,
    dataset: Dataset,
    *,
    ratios: tuple[float, ...] = RATIOS,
    answer_tokens: int = 3,
    progress: Callable[[Progress], None] = lambda _: None,
) -> None:
    """Ask what is missing in a table."""
    measure(decoder, dataset, ratios, table, answer_tokens=answer_tokens, seed=0, progress=progress)


def row_of(*differing: int, tokens: int = 20) -> Answers:
    """A question whose answers have so many tokens that differ, for each of `RATIOS`."""
    return {
        ratio: AuditedAnswer(ratio, ratio, tokens, tokens - count)
        for ratio, count in zip(RATIOS, differing, strict=True)
    }


def test_each_question_is_asked_once_with_each_ratio_and_a_second_run_asks_nothing(
    tiny_decoder: Callable[..., Decoder], town_dataset: Dataset, tmp_path: Path
) -> None:
    shown: list[Progress] = []
    table = tmp_path / "table.jsonl"
    decoder = tiny_decoder("Llama")
    count = len(town_dataset.questions)
    for expected in ("Asking", None):
        shown.clear()
        fill(table, decoder, town_dataset, progress=shown.append)
        assert (shown[-1].what if shown else None) == expected
    with pytest.raises(ConfigError, match=r"has the ratios 0\.15, 0\.6"):
        fill(table, decoder, town_dataset, ratios=(0.3,))
    other_model = tiny_decoder("Qwen2")
    for model, tokens in ((decoder, 4), (other_model, 3)):
        with pytest.raises(ConfigError, match="made with another model"):
            fill(table, model, town_dataset, answer_tokens=tokens)
    rows = [row.answers for row in read_table(table)]
    assert len(rows) == count
    assert all(tuple(row) == RATIOS for row in rows)

    # They are the answers of a stream with the fixed ratio.
    _, *fixed = measure_stream(
        decoder,
        Dataset("towns", town_dataset.documents, town_dataset.questions * 10),
        tmp_path / "caches",
        StreamSettings(0.9, requests=count * 10, answer_tokens=3, to_the_end=True),
        ratios=RATIOS,
        seed=0,
        progress=shown.append,
    )
    for ratio, result in zip(RATIOS, fixed, strict=True):
        one_by_one = [(answer.tokens, answer.agreeing) for answer in result.answers[:count]]
        assert [(row[ratio].tokens, row[ratio].agreeing) for row in rows] == one_by_one


def test_a_run_that_was_killed_in_a_line_goes_on_from_the_line_before(
    tiny_decoder: Callable[..., Decoder], town_dataset: Dataset, tmp_path: Path
) -> None:
    table = tmp_path / "table.jsonl"
    decoder = tiny_decoder("Llama")
    fill(table, decoder, town_dataset)
    whole = table.read_bytes()
    table.write_bytes(whole[:-20])
    assert len(read_table(table)) == len(town_dataset.questions) - 1
    fill(table, decoder, town_dataset)
    assert table.read_bytes() == whole


def test_a_ratio_between_two_gets_one_of_their_answers_by_distance() -> None:
    row = row_of(10, 0)
    dice = random.Random(0)
    assert answer_at(row, 0.05, dice) is row[0.15]
    assert answer_at(row, 0.6, dice) is row[0.6]
    third = [answer_at(row, 0.3, dice) is row[0.6] for _ in range(3000)]
    assert sum(third) / 3000 == pytest.approx(1 / 3, abs=0.03)
    assert answer_at(row_of(10, 5), 1.0, dice).agreeing == 20


def test_a_stream_goes_to_the_ratio_that_agrees_and_is_compared_with_fixed_ones() -> None:
    rows = [row_of(4, 0), row_of(2, 0), row_of(0, 0)]
    stream = replay(random.Random(0).choices(rows, k=100), 0.98, random.Random(1))
    assert stream.answers[0].ratio == 0.15
    assert stream.answers[-1].ratio > 0.4
    comparison = compare(
        rows, StreamSettings(0.98, requests=100, answer_tokens=16), orders=10, seed=0
    )
    assert comparison.fixed[0.15].holds_in_every_tenth == 0.0
    assert comparison.fixed[0.6].holds_in_every_tenth == 1.0
    assert comparison.fixed[0.15].agreement < comparison.with_target.agreement < 1.0
    assert comparison.cheaper >= 0.9  # 0.6 is the smallest that holds; the first answers cost less
    assert len(comparison.with_target.agreement_of_tenths) == 10
    assert agreement_of(stream.answers) < 1.0


def test_it_replays_a_table_without_a_model(tmp_path: Path) -> None:
    table = tmp_path / "table.jsonl"
    line = table_line({"0.15": [10, 9, 0.3], "0.6": [10, 10, 0.7]})
    table.write_text(line * 3)
    arguments = ["quality-replay", "--table", str(table), "--questions", "0", "--orders", "4"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.output)
    assert result["questions"] == 3
    assert result["fixed"]["0.15"]["agreement"] == pytest.approx(0.9)
    shown = CliRunner().invoke(app, arguments)
    assert "every tenth holds" in shown.output


@pytest.mark.parametrize(
    "line",
    [
        "no JSON\n",
        "[1]\n",
        "{}\n",
        table_line({"0.15": [1, 2]}),
        table_line({"much": [1, 1, 1]}),
    ],
)
def test_another_file_is_refused(line: str, tmp_path: Path) -> None:
    table = tmp_path / "table.jsonl"
    table.write_text(line)
    with pytest.raises(ConfigError, match="line 1"):
        read_table(table)


def test_a_file_without_a_whole_line_is_refused_and_stays_as_it_is(
    tiny_decoder: Callable[..., Decoder], town_dataset: Dataset, tmp_path: Path
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes")
    with pytest.raises(ConfigError, match="holds no whole line"):
        fill(notes, tiny_decoder("Llama"), town_dataset)
    assert notes.read_text() == "my notes"


def test_lines_with_other_ratios_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "table.jsonl"
    table.write_text(table_line({"0.15": [1, 1, 0.3]}) + table_line({"0.2": [1, 1, 0.3]}))
    with pytest.raises(ConfigError, match="other ratios in line 2"):
        read_table(table)
