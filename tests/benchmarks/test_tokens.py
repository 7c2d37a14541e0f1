"""Tokens to prefill and to decode in conversations with passages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.model.decoder import Decoder


def _task(passages: list[str], *turns: str, speaker: str = "agent") -> str:
    speakers = ["user" if place % 2 == 0 else speaker for place in range(len(turns))]
    return json.dumps(
        {
            "contexts": [{"document_id": "d", "text": text} for text in passages],
            "input": [
                {"speaker": who, "text": text} for who, text in zip(speakers, turns, strict=True)
            ],
            "targets": [{"speaker": "agent", "text": "In 1701."}],
        }
    )


@pytest.mark.usefixtures("as_loud_as_before")
def test_prompts_and_answers_are_counted_by_part(
    tiny_decoder: Callable[..., Decoder], benchmark_json: Callable[..., Any], tmp_path: Path
) -> None:
    decoder = tiny_decoder("Llama")
    decoder.model.save_pretrained(tmp_path / "model")
    decoder.tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "tasks.jsonl"
    long = "The mill of Arden was built in 1701. " * 400  # longer than the model's context
    tasks = [
        _task([long, "The inn is new."], "When was it built?"),
        _task(["The inn is new."], "When?", "What do you mean?", "When was the inn built?"),
        _task([], "Nothing was found for this one?"),
    ]
    data.write_text("\n".join(tasks))
    found = benchmark_json("tokens", "--model", tmp_path / "model", "--data", data)
    assert found["requests"] == 2
    answer = len(decoder.tokenizer.encode("In 1701.", add_special_tokens=False))
    assert found["decode"]["mean"] == answer
    assert found["prefill"]["mean"] > len(decoder.tokenizer.encode(long)) / 2
    assert sum(found["parts of the prompts"].values()) == pytest.approx(1.0)
    assert found["parts of the prompts"]["chunks"] > 0.9
    data.write_text(_task(["The inn."], "When?", "Hm?", "When?", speaker="robot"))
    with pytest.raises(DocumentError, match="speaker must be one of user, agent"):
        benchmark_json("tokens", "--model", tmp_path / "model", "--data", data)
