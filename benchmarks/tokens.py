"""Tokens to prefill and to decode in a conversation with retrieved passages (Cache-Craft Fig. 1 and 5).

Reads MT-RAG's generation tasks: JSON lines with `contexts` (the passages), `input` (the turns, the last one the
question) and `targets` (reference answers). The prompt is this package's, with all passages and turns; the answer to
decode is the reference answer. Nothing is computed by the model, only its tokenizer is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json
from cachecraft_rag.errors import DocumentError
from cachecraft_rag.evaluation.formats import JsonRecord, read_records
from cachecraft_rag.evaluation.intervals import mean_interval
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.prompt.builder import PromptBuilder, Turn
from cachecraft_rag.types.documents import Chunk

_SPEAKERS = {"user": "user", "agent": "assistant"}
_QUARTILES = (0.25, 0.5, 0.75)


def count(builder: PromptBuilder, tokenizer: Any, record: JsonRecord) -> dict[str, int] | None:
    """Return the tokens of one request by part, and those of its answer; None without passages or an answer.

    Raises:
        DocumentError: a field is missing, or a speaker is unknown.
    """
    passages = [Chunk(one.text("text")) for one in record.records("contexts")]
    answers = [one.text("text") for one in record.records("targets")]
    if not passages or not answers:
        return None
    turns: list[Turn] = []
    for turn in record.records("input"):
        speaker = _SPEAKERS.get(turn.text("speaker"))
        if speaker is None:
            raise DocumentError(f"{turn.where}: the speaker must be one of {', '.join(_SPEAKERS)}")
        turns.append((speaker, turn.text("text")))
    prompt = builder.build(turns[-1][1], passages, history=turns[:-1])
    system, *chunks, question = (len(segment.token_ids) for segment in prompt.segments)
    return {
        "instruction": system,
        "chunks": sum(chunks),
        "question and turns": question,
        "prefill": system + sum(chunks) + question,
        "decode": len(tokenizer.encode(answers[0], add_special_tokens=False)),
    }


def summary(counts: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Return means with 95 % intervals over requests, quartiles, and each part's share of the prompts."""
    both = {name: [one[name] for one in counts] for name in ("prefill", "decode")}
    whole = sum(both["prefill"])
    parts = ("instruction", "chunks", "question and turns")
    means = {name: mean_interval(values) for name, values in both.items()}
    return {
        "requests": len(counts),
        **{
            name: {
                "mean": means[name].mean,
                "low": means[name].low,
                "high": means[name].high,
                "quartiles": np.quantile(values, _QUARTILES).tolist(),
            }
            for name, values in both.items()
        },
        "prefill / decode": means["prefill"].mean / means["decode"].mean,
        "parts of the prompts": {part: sum(one[part] for one in counts) / whole for part in parts},
    }


def main(
    data: Annotated[Path, typer.Option("--data", "-d", help="MT-RAG's generation tasks.")],
    model: options.Model = "demo",
    as_json: options.Json = False,
) -> None:
    """Tokens of prompts and answers in conversations with passages."""
    options.quiet_libraries()
    decoder = Decoder.load(model)
    # no prompt is shortened, whatever fits into this model's context
    builder = PromptBuilder(decoder.tokenizer, context_length=1 << 30, best_last=False)
    found = [count(builder, decoder.tokenizer, record) for record in read_records(data)]
    counts = [one for one in found if one is not None]
    if not counts:
        raise DocumentError(f"{data}: no request has passages and an answer")
    report = summary(counts)
    if as_json:
        print_json(report)
    else:
        out.print_json(json.dumps(report))
