"""What reuse costs, measured against full prefill: the command on files of a user's own and on the handbook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachecraft_rag.evaluation.dataset import Question
from cachecraft_rag.evaluation.fidelity import Comparison, main
from cachecraft_rag.models import Decoder
from cachecraft_rag.prompt import PromptBuilder
from cachecraft_rag.types import Chunk


@pytest.fixture(scope="module")
def squad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two articles of three short paragraphs, in SQuAD's published form."""
    articles = [
        {
            "title": name,
            "paragraphs": [
                {
                    "context": f"The {name} of {town} was built in {year} and stands beside the river.",
                    "qas": [
                        {"id": f"{name}{year}", "question": f"When was the {name} of {town} built?", "answers": []}
                    ],
                }
                for town, year in (("Arden", 1701), ("Brook", 1802), ("Corry", 1903))
            ],
        }
        for name in ("mill", "bridge")
    ]
    path = tmp_path_factory.mktemp("data") / "squad.json"
    path.write_text(json.dumps({"version": "1.1", "data": articles}), encoding="utf-8")
    return path


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert main(["--data", str(tmp_path / "missing.json")]) == 2


def test_recomputing_everything_costs_nothing_and_nothing_costs_most(tiny_decoder: Any, squad: Path) -> None:
    decoder: Decoder = tiny_decoder("Llama")
    texts = [f"{place}. " + "water filter limescale kettle "[place:] * 3 for place in range(6)]
    chunks = tuple(Chunk(text) for text in texts)
    prompts = PromptBuilder(decoder.tokenizer, context_length=decoder.context_length)
    comparison = Comparison(decoder, prompts, Question("1", "How often?", chunks[:3], ()), unrelated=chunks[3:], seed=0)
    everything = [np.arange(len(segment.token_ids)) for segment in comparison.chunks]
    full, agreement = comparison.divergence(everything)
    assert abs(full) < 1e-5
    assert agreement == 1.0
    naive, _ = comparison.divergence(comparison.selection("craft", 0.0))
    half, _ = comparison.divergence(comparison.selection("craft", 0.5))
    assert naive > half > full
    sizes = [len(chosen) for chosen in comparison.selection("random", 0.25)]
    assert sizes == [-(-len(segment.token_ids) // 4) for segment in comparison.chunks]


@pytest.mark.parametrize("data", ["a file", "the handbook"])
def test_the_command_ends_in_one_json_line(
    data: str, squad: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--data", str(squad)] if data == "a file" else []
    assert main([*given, "--questions", "2", "--passages", "2", "--model", str(demo_model)]) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["questions"] == 2
    assert all(report[name] > 0 for name in ("kl_naive", "kl_random", "kl_craft"))
    assert report["recovered"] == pytest.approx(1 - report["kl_craft"] / report["kl_naive"])
