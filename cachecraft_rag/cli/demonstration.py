"""`cachecraft demo`: the whole story on the sample handbook and the embedded model."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cachecraft_rag.cli import options
from cachecraft_rag.cli.answers import load
from cachecraft_rag.cli.options import DEFAULT_STORE, err, out, print_json, progress_bar
from cachecraft_rag.config import ReuseConfig, SamplingParams
from cachecraft_rag.embedded import handbook_folder, handbook_questions

if TYPE_CHECKING:
    from cachecraft_rag.rag import CacheCraft
    from cachecraft_rag.stats import Answer


@dataclass(frozen=True)
class Compared:
    """One question, answered over reused chunk-caches and over a fully computed prompt."""

    question: str
    reused: Answer
    full: Answer
    own_prefill_s: float

    @property
    def speedup(self) -> float:
        """How many times sooner the first token came than the model's own prefill takes."""
        return self.own_prefill_s / self.reused.stats.ttft_s


def demo(
    store: options.Store = DEFAULT_STORE / "demo",
    questions: Annotated[int, typer.Option("--questions", min=1, help="How many to ask.")] = 10,
    top_k: options.TopK = 5,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Index a sample handbook, answer questions about it, and compare with full prefill. Run it twice: the second run
    starts
    from the disk."""
    options.set_threads(threads)
    with load("demo", store=store) as rag:
        _prepare(rag)
        compared = []
        for asked in handbook_questions()[:questions]:
            compared.append(_compare(rag, asked.question, top_k))
            if not as_json:
                _print_one(compared[-1])
    if as_json:
        print_json([_as_dict(one) for one in compared])
    else:
        _print_summary(compared)


def _prepare(rag: CacheCraft) -> None:
    """Index the handbook and bear its chunk-caches; both skip what an earlier run has done."""
    with progress_bar("Indexing the sample handbook") as move:
        report = rag.add_documents(handbook_folder(), progress=lambda done: move(done.files_done, done.files_total))
    with progress_bar("Computing chunk-caches") as move:
        born = rag.prime(progress=move)
    done = f"{born} chunk-caches computed" if born else "all chunk-caches are on disk from an earlier run"
    err.print(f"{len(report.added)} pages added, {len(report.unchanged)} unchanged; {done}", highlight=False)


def _compare(rag: CacheCraft, question: str, top_k: int) -> Compared:
    sampling = SamplingParams(max_new_tokens=60)
    reused = rag.ask(question, top_k=top_k, sampling=sampling)
    full = rag.ask(question, top_k=top_k, sampling=sampling, config=ReuseConfig(reuse=False, births=False))
    return Compared(question, reused, full, _own_prefill(rag, question, top_k))


def _own_prefill(rag: CacheCraft, question: str, top_k: int) -> float:
    """Seconds of the unmodified model's own prefill of the same prompt, down to the first token."""
    hits = rag.retrieve(question, top_k=top_k)
    prompt = rag.engine.prompts.build(question, rag.index.get([hit.chunk_id for hit in hits]), reserve=60)
    started = time.perf_counter()
    rag.engine.decoder.own_logits(prompt.token_ids).argmax().item()
    return time.perf_counter() - started


def _print_one(one: Compared) -> None:
    stats = one.reused.stats
    out.print(f"\n[bold]{one.question}[/]", highlight=False)
    out.print(one.reused.text.strip(), markup=False, highlight=False)
    if one.reused.text != one.full.text:
        out.print(f"full prefill says: {one.full.text.strip()}", style="yellow", markup=False, highlight=False)
    sources = dict.fromkeys(str(source.metadata.get("source")) for source in one.reused.sources)
    tiers = ", ".join(sorted({chunk.tier for chunk in stats.chunks if chunk.tier}))
    out.print(f"from {', '.join(sources)}", style="dim", highlight=False)
    out.print(
        f"first token: full prefill {one.own_prefill_s:.2f} s, reuse {stats.ttft_s:.2f} s, "
        f"[bold]{one.speedup:.1f} times sooner[/]; "
        f"{stats.tokens_prompt} tokens, {stats.tokens_reused} reused (from {tiers or 'nowhere yet'}), "
        f"{stats.tokens_recomputed} recomputed, {stats.tokens_computed} computed",
        style="dim",
        highlight=False,
    )


def _print_summary(compared: list[Compared]) -> None:
    table = Table(
        "question", "full prefill", "reuse", "sooner", "prompt", "reused", "recomputed", "computed", "same answer"
    )
    for one in compared:
        stats = one.reused.stats
        table.add_row(
            one.question,
            f"{one.own_prefill_s:.2f} s",
            f"{stats.ttft_s:.2f} s",
            f"{one.speedup:.1f} ×",
            str(stats.tokens_prompt),
            str(stats.tokens_reused),
            str(stats.tokens_recomputed),
            str(stats.tokens_computed),
            "yes" if one.reused.text == one.full.text else "differs",
        )
    out.print(table)
    own = statistics.median(one.own_prefill_s for one in compared)
    reuse = statistics.median(one.reused.stats.ttft_s for one in compared)
    same = sum(one.reused.text == one.full.text for one in compared)
    out.print(
        f"median time to first token: full prefill {own:.2f} s, reuse {reuse:.2f} s: "
        f"[bold]{own / reuse:.1f} times sooner[/]; "
        f"{same} of {len(compared)} answers word for word the same",
        highlight=False,
    )


def _as_dict(one: Compared) -> dict[str, Any]:
    return {
        "question": one.question,
        "answer": one.reused.as_dict(),
        "full_text": one.full.text,
        "own_prefill_s": one.own_prefill_s,
        "speedup": one.speedup,
    }
