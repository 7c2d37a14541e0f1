"""The same requests on two checkouts: equal answers, and the same chunks reused, recomputed and computed.

Each checkout answers in a separate process, on a tiny random model that writes letters only, so its text names its
tokens. Nothing depends on clocks: chunk-caches load layer by layer, and all that follows from an answer is awaited
before the next question.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from cachecraft_rag import Chunk, Engine, ReuseConfig, SamplingParams

_ALL = 200
_CHUNKS, _IN_PROMPT = 12, 3
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Runs this file with the package of another checkout, whose folders `kernels` and `retrievers` are parts of it.
_START = (
    "import runpy, sys; checkout, script, *sys.argv[1:] = sys.argv[1:]; sys.path.insert(0, checkout)\n"
    "import cachecraft_rag; cachecraft_rag.__path__.append(checkout); runpy.run_path(script, run_name='__main__')"
)


@dataclass(frozen=True)
class Group:
    """Requests to one engine over a separate store.

    count     of all 200
    options   of `Engine.from_pretrained`
    reuse     fields of `ReuseConfig` and of its method
    sampling  fields of `SamplingParams`
    at_once   requests that are asked together
    plain     the chunks are part of the question, as unmarked text
    sessions  requests belong to one of two sessions, and have a history
    """

    name: str
    count: int
    options: dict[str, Any] = field(default_factory=dict)
    reuse: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    at_once: int = 1
    plain: bool = False
    sessions: bool = False


# Nothing may depend on the clock, and defaults have changed; a checkout gets those of these settings that it has.
_REUSE = {"loading": "layerwise", "nearest_share": 0.0, "probe_min_rows": 128, "alpha": 0.25}
_OFF = {"new_variants": "off"}
_PAPER = {
    "selector": "cache_craft",
    "budget_scope": "chunk",
    "drift": 0.0,
    "early_termination": "published",
}
GROUPS = (
    Group("moved", 30, _OFF),
    Group("new variants", 20),
    Group("from disk", 15, _OFF | {"host_bytes": 0}, {"loading": "whole"}),
    Group("evicted", 25, {"host_bytes": 1 << 20, "disk_bytes": 3 << 20}),
    Group("sessions", 20, _OFF, sessions=True),
    Group("int8", 15, _OFF | {"codec": "int8", "host_bytes": 0}),
    Group("entropy", 15, _OFF | {"codec": "entropy", "host_bytes": 0}),
    Group("early termination", 15, _OFF, _PAPER),
    Group("plain prompts", 15, plain=True),
    Group("two at once", 20, _OFF, at_once=2),
    Group(
        "ratio, drawn",
        10,
        _OFF,
        {"recompute_ratio": 0.2},
        {"temperature": 0.8},
    ),
)


def tiny_model(folder: Path) -> None:
    """Save a random Llama of four layers, with a token for each byte, of which it writes printable letters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"]}
    )
    tokenizer.chat_template = _TEMPLATE
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=256,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    texts = [tokenizer.decode([token]) for token in range(config.vocab_size)]
    letters = [len(text) == 1 and text.isascii() and text.isprintable() for text in texts]
    with torch.no_grad():  # the usual initialisation is so small that every token would look alike
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
        model.lm_head.weight[~torch.tensor(letters)] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def answers(model: str, requests: int) -> Iterator[dict[str, Any]]:
    """Answer a share of each group's requests: text, numbers without times, and the outcome of each chunk."""
    for group in GROUPS:
        count = -(-group.count * requests // _ALL)
        with (
            tempfile.TemporaryDirectory() as store,
            Engine.from_pretrained(model, store=store, dtype="float32", **group.options) as engine,
        ):
            for first in range(0, count, group.at_once):
                numbers = range(first, min(first + group.at_once, count))
                yield from asyncio.run(_together(engine, group, numbers))
                engine.settle()


async def _together(engine: Engine, group: Group, numbers: range) -> list[dict[str, Any]]:
    """Ask in order, without waiting for the answers, so that the order in which they run is always the same."""
    return await asyncio.gather(*(_answer(engine, group, number) for number in numbers))


def reuse_config(settings: Mapping[str, Any]) -> ReuseConfig:
    """Return the settings with these names that this checkout knows.

    Older checkouts have no `ReuseMethod`, and of early termination only Algorithm 1, as True.
    """
    known = {field.name: field.default for field in fields(ReuseConfig)}
    if isinstance(known.get("early_termination"), bool):
        is_on = settings.get("early_termination") == "published"
        settings = {**settings, "early_termination": is_on}
    config = ReuseConfig(**{name: value for name, value in settings.items() if name in known})
    if "method" not in known:
        return config
    return config.with_method(
        **{name: value for name, value in settings.items() if name not in known}
    )


async def _answer(engine: Engine, group: Group, number: int) -> dict[str, Any]:
    draw = random.Random(number // group.at_once)
    texts = [
        f"{place}. " + " ".join(draw_word(place, word) for word in range(30))
        for place in range(_CHUNKS)
    ]
    chosen = draw.sample(texts, _IN_PROMPT)
    question, chunks = f"What of {number}?", [Chunk(text) for text in chosen]
    if group.plain:
        question, chunks = "\n\n".join([*chosen, question]), []
    given: dict[str, Any] = {}
    if group.sessions:
        history = [("user", f"And {number % 3}?"), ("assistant", "No.")]
        given = {"session": ("ada", "bob")[number % 2], "history": history}
    config = reuse_config(_REUSE | group.reuse)
    sampling = SamplingParams(max_new_tokens=12, seed=number, **group.sampling)
    answer = engine.stream(question, chunks, sampling=sampling, config=config, **given)
    text = "".join([piece async for piece in answer])
    stats = answer.stats.as_dict()
    counts = {
        name: value
        for name, value in stats.items()
        if name.startswith("tokens_") or name == "finish"
    }
    names = ("chunk_id", "outcome", "reason_code", "tokens", "recomputed", "computed")
    parts = [[str(chunk[name]) for name in names] for chunk in stats["chunks"]]
    # older checkouts give no reason for recomputed tokens
    parts = [["" if value == "fixed" else value for value in part] for part in parts]
    share = round(stats["recompute_share"], 6)
    return {
        "request": f"{group.name} {number}",
        "text": text,
        "share": share,
        "chunks": parts,
    } | counts


def draw_word(place: int, word: int) -> str:
    """A word of the text of a chunk, the same in every process."""
    return random.Random(f"{place} {word}").choice(
        ("kettle", "limescale", "weeks", "water", "boil", "the", "filter")
    )


def main(
    against: Annotated[Path, typer.Option(help="Another checkout of the repository.")],
    python: Annotated[
        str | None, typer.Option(help="Its Python; by default that of its .venv, or this one.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model of both; tiny: a small random one.")] = "tiny",
    requests: Annotated[
        int, typer.Option(min=1, max=_ALL, help="About so many of the 200.")
    ] = _ALL,
) -> None:
    """Answer the same requests with two checkouts and print where they differ; exit code 1 if they do."""
    other = against / ".venv" / "bin" / "python"
    pythons = {Path(__file__).parents[1]: sys.executable}
    pythons[against.resolve()] = python or (str(other) if other.exists() else sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        if model == "tiny":
            tiny_model(Path(folder))
        outputs = []
        for checkout, interpreter in (
            (path, pythons[path]) for path in (Path(__file__).parents[1], against.resolve())
        ):
            given = [str(checkout), __file__, folder if model == "tiny" else model, str(requests)]
            output = subprocess.check_output(
                [interpreter, "-P", "-c", _START, *given], env=dict(os.environ), text=True
            )
            outputs.append([json.loads(line) for line in output.splitlines()])
    equal = 0
    in_one_only: set[str] = set()
    for ours, theirs in zip(*outputs, strict=True):
        in_one_only |= ours.keys() ^ theirs.keys()
        different = [
            name for name in ours if name not in in_one_only and ours[name] != theirs[name]
        ]
        equal += not different
        for name in different:
            typer.echo(f"{ours['request']}: {name}: {ours[name]} here, {theirs[name]} there")
    if in_one_only:
        typer.echo(f"not compared, because one checkout lacks it: {', '.join(sorted(in_one_only))}")
    typer.echo(f"{equal} of {len(outputs[0])} equal")
    if equal < len(outputs[0]):
        sys.exit(1)


if __name__ == "__main__":  # in a process for one checkout
    for answer in answers(sys.argv[1], int(sys.argv[2])):
        sys.stdout.write(json.dumps(answer) + "\n")
