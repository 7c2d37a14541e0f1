"""The scan of model families: those that the page names pass their gate, others are refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from benchmarks import families, vllm_families
from benchmarks.families import (
    FamilyResult,
    as_outcomes,
    page_section,
    read_csv,
    rewrite_page,
    scan,
    tiny_decoder,
)
from cachecraft_rag.model.checkpoint import layout_of
from cachecraft_rag.vllm.options import VLLMOptions
from cachecraft_rag.vllm.plugin import ARCHITECTURES
from cachecraft_rag.vllm.refusals import refusal

DOCS = Path(__file__).parents[2] / "docs"

SERVED = [
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gemma4_text (keys are values)",
    "gpt_oss",
    "glm4",
    "cohere2",
    "ernie4_5",
    "smollm3",
    "olmo3",
    "olmo3 (YaRN in full layers)",
    "exaone4",
    "phi3",
    "phi3 (LongRoPE)",
    "phi3 (LongRoPE, partial rotary)",
    "nemotron",
    "stablelm",
    "phimoe",
    "phimoe (LongRoPE)",
    "deepseek_v3",
    "nanochat",
]
REFUSED = {
    "gemma4_text (per-layer inputs)": "take per_layer_input besides hidden states",
    "deepseek_v32": "an indexer chooses the keys",
    "hunyuan_v1_dense": "unknown form",
    "mamba": "one running state",
    "gpt2": "learned or absolute positions",
}


@pytest.mark.gate
@pytest.mark.parametrize("family", SERVED)
def test_a_family_answers_as_its_own_forward_does(family: str) -> None:
    result = scan(family)
    assert result.outcome == "accepted", result.reason


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused_with_the_reason(family: str) -> None:
    result = scan(family)
    assert result.outcome == "refused"
    assert REFUSED[family] in result.reason


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "gemma4_text", "cohere2", "deepseek_v3", "gpt_oss"]
)
def test_sizes_from_the_config_are_those_of_the_model(family: str) -> None:
    decoder = tiny_decoder(family)
    assert layout_of(decoder.model.config, "float32") == decoder.layout


def test_layers_of_two_kinds_have_two_tables() -> None:
    decoder = tiny_decoder("gemma3_text")
    positions = torch.arange(50)
    assert sorted(set(decoder.rotary_kinds)) == [0, 1]
    assert not torch.equal(decoder.rope(positions, 0)[0], decoder.rope(positions, 1)[0])


def test_a_wrong_answer_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "own_answer", lambda decoder, ids: [0])
    result = scan("llama")
    assert result.outcome == "refused"
    assert "its own generate gives [0]" in result.reason


def test_the_command_writes_json_csv_and_the_page(
    benchmark_output: Callable[..., str], tmp_path: Path
) -> None:
    table = tmp_path / "models.csv"
    page = tmp_path / "models.md"
    page.write_text(f"Before.\n{families._BEGIN}old\n{families._END}\nAfter.\n")
    printed = benchmark_output(
        "families", "llama", "gpt2", "--json", "--csv", table, "--page", page
    )
    found: dict[str, Any] = json.loads(printed)
    assert list(found["accepted"]) == ["llama"]
    assert list(found["refused"]) == ["gpt2"]
    results = read_csv(table)
    assert as_outcomes(results) == found
    text = page.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert page_section(results) in text
    assert "old" not in text


def families_on_the_page(
    folder: Path, results: list[FamilyResult], rewrite: Callable[[Path, list[FamilyResult]], object]
) -> set[str]:
    """Return the accepted families, once it is sure that the page lists these results."""
    copy = folder / "models.md"
    copy.write_text((DOCS / "models.md").read_text())
    rewrite(copy, results)
    assert copy.read_text() == (DOCS / "models.md").read_text()
    return {result.family for result in results if result.outcome == "accepted"}


def test_the_page_is_made_from_its_csv(tmp_path: Path) -> None:
    accepted = families_on_the_page(tmp_path, read_csv(DOCS / "models.csv"), rewrite_page)
    assert accepted >= set(SERVED)


def test_the_lists_over_vllm_are_made_from_their_csv(tmp_path: Path) -> None:
    """tests/vllm/test_families.py serves each of these."""
    results = read_csv(DOCS / "models_vllm.csv")
    accepted = families_on_the_page(tmp_path, results, vllm_families.rewrite_page)
    assert accepted == vllm_families.FAMILIES.keys() | vllm_families.MULTIMODAL.keys()
    served = {vllm_families.architecture_of(family) for family in accepted}
    assert served == ARCHITECTURES.keys()
    assert not served & {result.family for result in results}, "also listed as refused"


def test_no_architecture_that_is_refused_by_name_is_listed_as_not_tried() -> None:
    results = read_csv(DOCS / "models_vllm.csv")
    names = [result.family for result in results if result.outcome == "not tried"]
    assert names
    for name in names:
        refused = refusal(PretrainedConfig(architectures=[name]), VLLMOptions())
        assert refused is not None
        assert refused.reason.startswith("its architecture is"), name


def test_reasons_are_grouped() -> None:
    results = [
        FamilyResult("a", "refused", "it is late"),
        FamilyResult("b", "refused", "it is late"),
    ]
    assert "- **a, b**: it is late." in page_section(results)
