"""What reuse costs: the next-token distributions of reuse against full prefill, along the full-prefill answer.

For each question the model's greedy answer over the fully computed prompt is forced upon every method, and the
Kullback-Leibler divergence KL(full ‖ method) of the next-token distributions is averaged along it. All chunks are
born behind unrelated ones, on purpose: the hardest case. Run it with `python -m cachecraft_rag.evaluation.fidelity
--data FILE`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from cachecraft_rag.births import BirthDescriber
from cachecraft_rag.config import ReuseConfig
from cachecraft_rag.errors import CacheCraftError
from cachecraft_rag.evaluation.dataset import Dataset, Question, handbook_dataset, load_dataset
from cachecraft_rag.models import Decoder
from cachecraft_rag.prefill import PrefillInput, Reused, decode_step, prefill
from cachecraft_rag.prompt import Prompt, PromptBuilder, Segment
from cachecraft_rag.selection import TokenFacts, select, selector_named
from cachecraft_rag.types import Chunk

ANSWER_TOKENS = 16


@dataclass(frozen=True)
class FidelityReport:
    """Mean KL to full prefill: `kl_naive` nothing recomputed, `kl_random` and `kl_craft` at the recompute ratio.

    recovered  share of the naive KL that the paper's selector wins back
    top1_*     share of positions where the most likely token is the same
    """

    kl_naive: float
    kl_random: float
    kl_craft: float
    recovered: float
    top1_naive: float
    top1_random: float
    top1_craft: float
    questions: int
    ratio: float
    model: str
    dtype: str


@dataclass(frozen=True)
class BornChunk:
    """A chunk as some other prompt left it: raw `[layers, 2, tokens, kv_heads, head_dim]`, and eq. 14's scores."""

    kv: Tensor
    token_inter: np.ndarray | None


def born_behind(decoder: Decoder, prompts: PromptBuilder, chunk: Segment, before: Sequence[Segment]) -> BornChunk:
    """Compute a chunk behind the given ones and keep what a store would keep."""
    prompt = Prompt((prompts.system, *before, chunk))
    bounds, last = prompt.bounds, len(prompt.segments) - 1
    output = prefill(decoder, PrefillInput(prompt.token_ids, bounds, range(bounds[-1]), births=[last]))
    birth = output.recorder.births[0]
    describer = BirthDescriber(birth, output.recorder.settings, bounds=bounds, sink_tokens=ReuseConfig().sink_tokens)
    for layer in range(decoder.layout.layers):
        describer.add_layer(layer, output.merged.kv[layer, 0])
    return BornChunk(birth.kv, describer.statistics().token_scores.inter)


class Comparison:
    """One question under full prefill and under any choice of recomputed tokens."""

    def __init__(
        self, decoder: Decoder, prompts: PromptBuilder, asked: Question, *, unrelated: Sequence[Chunk], seed: int
    ) -> None:
        self._decoder = decoder
        prompt = prompts.build(asked.text, asked.passages, reserve=ANSWER_TOKENS)
        self._bounds = prompt.bounds
        answer = self._full_answer(prompt.token_ids)
        self._ids = [*prompt.token_ids, *answer[:-1]]
        self._keep = len(answer)
        self.chunks = prompt.segments[1:-1]
        draw = random.Random(seed)
        few = draw.sample(unrelated, min(len(unrelated), 2 * len(asked.passages)))
        others = [prompts.chunk_segment(chunk) for chunk in few]
        self.born = [born_behind(decoder, prompts, c, draw.sample(others, draw.randint(1, 2))) for c in self.chunks]
        everything = PrefillInput(self._ids, self._spans(), range(len(self._ids)), births=[0])
        output = prefill(decoder, everything, logits_to_keep=self._keep)
        self._system = output.recorder.births[0].kv
        self._reference = output.logits.reshape(self._keep, -1).log_softmax(-1)

    def _full_answer(self, ids: list[int]) -> list[int]:
        work = PrefillInput(ids, self._bounds, range(len(ids)), capacity=len(ids) + ANSWER_TOKENS)
        output = prefill(self._decoder, work)
        answer = [int(output.logits.argmax())]
        while len(answer) < ANSWER_TOKENS and answer[-1] not in self._decoder.end_tokens:
            position = len(ids) + len(answer) - 1
            answer.append(int(decode_step(self._decoder, output.merged, answer[-1], position).argmax()))
        return answer

    def _spans(self) -> list[int]:
        return [*self._bounds[:-1], len(self._ids)]

    def divergence(self, recompute: Sequence[np.ndarray]) -> tuple[float, float]:
        """Mean KL and top-1 agreement when these tokens (offsets in each chunk) are recomputed and the rest reused."""
        rows: list[int] = []
        reused = [Reused(0, self._system)]
        for start, born, chosen in zip(self._bounds[1:], self.born, recompute, strict=False):
            reused.append(Reused(start, born.kv))
            rows += (chosen + start).tolist()
        rows += range(self._bounds[-2], len(self._ids))
        output = prefill(
            self._decoder, PrefillInput(self._ids, self._spans(), rows, reused=reused), logits_to_keep=self._keep
        )
        found = output.logits.reshape(self._keep, -1).log_softmax(-1)
        reference = self._reference
        kl = (reference.exp() * (reference - found)).sum(-1).mean()
        agreement = (reference.argmax(-1) == found.argmax(-1)).float().mean()
        return float(kl), float(agreement)

    def selection(self, selector: str, ratio: float) -> list[np.ndarray]:
        """The tokens a selector picks in each chunk at recompute ratio r: ⌈r · tokens⌉."""
        chosen = []
        for segment, born in zip(self.chunks, self.born, strict=True):
            tokens = len(segment.token_ids)
            facts = TokenFacts(tokens, born.token_inter, seed=int(segment.segment_id[:8], 16))
            chosen.append(select(facts, math.ceil(ratio * tokens), selector_named(selector)))
        return chosen


def measure(decoder: Decoder, data: Dataset, *, ratio: float, seed: int, console: Console) -> FidelityReport:
    """Compare naive reuse, random recomputation and the paper's selector over all questions."""
    prompts = PromptBuilder(decoder.tokenizer, context_length=decoder.context_length)
    found: dict[str, list[tuple[float, float]]] = {"naive": [], "random": [], "craft": []}
    for place, asked in enumerate(track(data.questions, "Comparing with full prefill", console=console)):
        comparison = Comparison(decoder, prompts, asked, unrelated=data.unrelated(asked), seed=seed + place)
        found["naive"].append(comparison.divergence(comparison.selection("craft", 0.0)))
        for selector in ("random", "craft"):
            found[selector].append(comparison.divergence(comparison.selection(selector, ratio)))
    kl = {name: statistics.fmean(value for value, _ in values) for name, values in found.items()}
    top1 = {name: statistics.fmean(value for _, value in values) for name, values in found.items()}
    return FidelityReport(
        kl_naive=kl["naive"],
        kl_random=kl["random"],
        kl_craft=kl["craft"],
        recovered=1.0 - kl["craft"] / kl["naive"],
        top1_naive=top1["naive"],
        top1_random=top1["random"],
        top1_craft=top1["craft"],
        questions=len(data.questions),
        ratio=ratio,
        model=decoder.name,
        dtype=decoder.layout.dtype,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the last line of the output is one JSON object. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cachecraft_rag.evaluation.fidelity", description=__doc__)
    parser.add_argument("--data", type=Path, help="a file of questions (default: the sample handbook's own)")
    parser.add_argument("--questions", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--passages", type=int, default=3, help="chunks in each prompt (default: 3)")
    parser.add_argument("--ratio", type=float, default=0.15, help="recompute ratio r (default: 0.15)")
    parser.add_argument("--model", default="demo", help="Hugging Face name or folder (default: the embedded model)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default: float32)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    given = parser.parse_args(arguments)
    console = Console(stderr=True)
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        draw = {"limit": given.questions, "passages": given.passages, "seed": given.seed}
        data = load_dataset(given.data, **draw) if given.data else handbook_dataset(**draw)
        decoder = Decoder.load(given.model, dtype=given.dtype)
        report = measure(decoder, data, ratio=given.ratio, seed=given.seed, console=console)
    except CacheCraftError as error:
        console.print(f"[bold red]error:[/] {error}")
        return 2
    console.print(
        f"naive {report.kl_naive:.4f}, random {report.kl_random:.4f}, craft {report.kl_craft:.4f} mean KL to full "
        f"prefill at r = {report.ratio}; the paper's selector recovers {report.recovered:.0%} of what naive reuse loses"
    )
    print(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
