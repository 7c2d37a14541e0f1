"""`cachecraft demo`: index the sample handbook, answer with and without reuse on the bundled model, and compare.

Each question is asked once with reuse and once with full prefill. Between two questions the engine may finish its work
in idle time: it computes the reused chunks again, exactly, after the chunks that really stood before them. In the end
all questions are asked again with reuse, which finds these chunk-caches.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from cachecraft_rag.cli import options
from cachecraft_rag.cli.ask import load, whole_answer
from cachecraft_rag.cli.console import err, out
from cachecraft_rag.cli.options import print_json, print_table, progress_bar, takes, waiting
from cachecraft_rag.engine.settings import Settings
from cachecraft_rag.model.demo_model import HandbookQuestion, handbook_folder, handbook_questions
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.types.progress import Progress

if TYPE_CHECKING:
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.observability.stats import Answer
    from cachecraft_rag.rag import AnswerStream, CacheCraft

ANSWER_TOKENS = 60
SHOWN_LETTERS = 22  # of a question in the table
VERDICTS = {
    (True, True): "both",
    (True, False): "reuse",
    (False, True): "full",
    (False, False): "neither",
}


@dataclass(frozen=True)
class ComparedQuestion:
    """A question, answered with reuse and with full prefill.

    asked          the question
    reused         the answer with reuse, the first time
    full           the answer with full prefill
    own_prefill_s  seconds to the first token with the unmodified model
    again          the answer with reuse, after the engine's work in idle time; None before the question is asked again
    """

    asked: HandbookQuestion
    reused: Answer
    full: Answer
    own_prefill_s: float
    again: Answer | None = None

    @property
    def speedup(self) -> float:
        """Prefill time of the unmodified model divided by the time to the first token of `reused`; NaN without one."""
        return self.own_prefill_s / (self.reused.stats.ttft_s or math.nan)

    @property
    def speedup_again(self) -> float:
        """The same for `again`; NaN before it is there."""
        if self.again is None:
            return math.nan
        return self.own_prefill_s / (self.again.stats.ttft_s or math.nan)

    def is_right(self, answer: Answer) -> bool:
        """Return True if the answer contains every expected fact (a regular expression each, in any case)."""
        return all(re.search(pattern, answer.text, re.IGNORECASE) for pattern in self.asked.expect)


@takes(
    "store",
    "top_k",
    "dtype",
    "threads",
    "remote.url",
    "remote.key_file",
    defaults={"store": "chunk-caches/demo"},
)
def demo(
    questions: Annotated[int, typer.Option("--questions", min=1, help="How many to ask.")] = 10,
    as_json: options.Json = False,
    *,
    settings: Settings,
) -> None:
    """Index a sample handbook, answer questions about it, and compare with full prefill.

    In the end it asks the questions again: what repeats is reused exactly. A second run starts from the chunk-caches on
    disk, those of these questions too. Exit code 2 if the demo model, the handbook or the store cannot be used; wrong
    answers are counted in the table and do not change the exit code.
    """
    # Raises ConfigError, ModelNotFoundError, IndexStoreError, StoreError, or CacheCraftError without the handbook;
    # see `app.main` for exit codes.
    top_k = settings["top_k"]
    with load(settings.only("store", "top_k", "dtype", "threads", "remote.")) as rag:
        _prepare(rag)
        _warm_up(rag, top_k)
        compared = []
        for asked in handbook_questions()[:questions]:
            compared.append(_compare(rag, asked, top_k))
            if not as_json:
                _print_comparison(compared[-1])
            _engine_of(rag).settle()  # work in idle time would slow down what is timed next
        with progress_bar("Asking again") as show:
            for done, comparison in enumerate(compared):
                show(Progress(done, len(compared), ""))
                again = _ask(rag, comparison.asked.question, top_k)
                compared[done] = replace(comparison, again=again)
                _engine_of(rag).settle()
    if as_json:
        print_json([_as_dict(comparison) for comparison in compared])
    else:
        _print_summary(compared)


def _prepare(rag: CacheCraft) -> None:
    """Index the handbook and compute its chunk-caches; both skip the work of an earlier run."""
    with progress_bar("Indexing the sample handbook") as show:
        report = rag.add_documents(handbook_folder(), progress=show)
    with progress_bar("Computing chunk-caches") as show:
        captured = rag.prime(progress=show)
    done = (
        f"{captured} chunk-caches computed"
        if captured
        else "all chunk-caches are on disk from an earlier run"
    )
    pages = f"{len(report.added)} pages added, {len(report.unchanged)} unchanged"
    err.print(f"{pages}; {done}; the model runs in {rag.engine.decoder.layout.dtype}")


def _warm_up(rag: CacheCraft, top_k: int) -> None:
    """Run both sides once before anything is timed: the first pass of a process is always slow."""
    from cachecraft_rag.serving.sampling import SamplingParams

    with waiting("Warming up"):
        _own_prefill(rag, "Are you ready?", top_k)
        rag.ask("Are you ready?", top_k=1, sampling=SamplingParams(max_new_tokens=1))


def _compare(rag: CacheCraft, asked: HandbookQuestion, top_k: int) -> ComparedQuestion:
    # The model's own prefill is timed first: after an answer the engine begins its work in idle time.
    own_prefill_s = _own_prefill(rag, asked.question, top_k)
    reused = _ask(rag, asked.question, top_k)
    full = _ask(rag, asked.question, top_k, ReuseConfig.full_prefill())
    return ComparedQuestion(asked, reused, full, own_prefill_s)


def _ask(rag: CacheCraft, question: str, top_k: int, config: ReuseConfig | None = None) -> Answer:
    from cachecraft_rag.serving.sampling import SamplingParams

    sampling = SamplingParams(max_new_tokens=ANSWER_TOKENS)
    return _first_sentence_of(rag.stream(question, top_k=top_k, sampling=sampling, config=config))


def _first_sentence_of(stream: AnswerStream) -> Answer:
    """Read an answer up to the end of its first sentence: a model of this size would go on and invent."""
    answer = whole_answer(stream, brief=True)
    return replace(answer, text=answer.text.strip())


def _own_prefill(rag: CacheCraft, question: str, top_k: int) -> float:
    """Seconds to the first token with the unmodified model's own prefill of the same prompt."""
    engine = _engine_of(rag)
    hits = rag.retrieve(question, top_k=top_k)
    prompt = engine.prompts.build(
        question, rag.index.get([hit.chunk_id for hit in hits]), reserve=ANSWER_TOKENS
    )
    started = time.perf_counter()
    engine.decoder.own_logits(prompt.token_ids).argmax().item()
    return time.perf_counter() - started


def _engine_of(rag: CacheCraft) -> Engine:
    from cachecraft_rag.engine.engine import Engine

    assert isinstance(rag.engine, Engine), "the demo runs in this process"
    return rag.engine


def _print_comparison(comparison: ComparedQuestion) -> None:
    stats = comparison.reused.stats
    out.print(f"\n{comparison.asked.question}", style="bold")
    out.print(comparison.reused.text)
    if comparison.reused.text != comparison.full.text:
        out.print("full prefill says:", comparison.full.text, style="yellow")
    sources = dict.fromkeys(
        str(source.metadata.get("source")) for source in comparison.reused.sources
    )
    tiers = ", ".join(sorted({chunk.tier for chunk in stats.chunks if chunk.tier}))
    out.print(
        f"from {', '.join(sources)}\n"
        f"first token: full prefill {comparison.own_prefill_s:.2f} s, reuse {stats.ttft_s:.2f} s, "
        f"{comparison.speedup:.1f} times faster to the first token; {stats.tokens_prompt} tokens, "
        f"{stats.tokens_reused} reused (from {tiers or 'no tier'}), {stats.tokens_recomputed} recomputed, "
        f"{stats.tokens_computed} computed",
        style="dim",
    )


def _print_summary(compared: list[ComparedQuestion]) -> None:
    from cachecraft_rag.kernels.cpu.library import description

    rows = []
    for comparison in compared:
        stats = comparison.reused.stats
        question = comparison.asked.question
        if len(question) > SHOWN_LETTERS:
            question = f"{question[: SHOWN_LETTERS - 1]}…"
        verdict = (comparison.is_right(comparison.reused), comparison.is_right(comparison.full))
        rows.append(
            (
                question,
                f"{comparison.own_prefill_s:.2f} s",
                f"{stats.ttft_s:.2f} s",
                f"{comparison.speedup:.1f} ×",
                f"{stats.tokens_reused}/{stats.tokens_recomputed}/{stats.tokens_computed}",
                VERDICTS[verdict],
                f"{comparison.speedup_again:.1f} ×",
            )
        )
    print_table(
        (
            "question",
            "full",
            "reuse",
            "faster",
            "reused/\nrecomputed/\ncomputed",
            "right",
            "faster,\nagain",
        ),
        rows,
        numbers=True,
    )
    own_s = statistics.median(comparison.own_prefill_s for comparison in compared)
    reuse_s = statistics.median(comparison.reused.stats.ttft_s for comparison in compared)
    right_answers = sum(comparison.is_right(comparison.reused) for comparison in compared)
    full_right = sum(comparison.is_right(comparison.full) for comparison in compared)
    same = sum(comparison.reused.text == comparison.full.text for comparison in compared)
    out.print(
        f"median time to first token: full prefill {own_s:.2f} s, reuse {reuse_s:.2f} s: ", end=""
    )
    out.print(f"{own_s / reuse_s:.1f} times faster to the first token", style="bold")
    out.print(
        f"right answers: {right_answers} of {len(compared)} with reuse, {full_right} with full prefill; "
        f"{same} identical word for word"
    )
    _print_again(compared)
    out.print(
        "reused/recomputed/computed: prompt tokens from chunk-caches, recomputed in them, and computed from scratch; "
        f"CPU kernels: {description()}",
        style="dim",
    )


def _print_again(compared: list[ComparedQuestion]) -> None:
    """Print what the second time brought, in one line."""
    again = [(comparison, comparison.again) for comparison in compared if comparison.again]
    right = sum(comparison.is_right(answer) for comparison, answer in again)
    same = sum(answer.text == comparison.full.text for comparison, answer in again)
    exact = sum(answer.stats.exact for _, answer in again)
    speedup = statistics.median(comparison.speedup_again for comparison, _ in again)
    out.print("asked again, after idle time: ", end="")
    out.print(f"{speedup:.1f} times faster to the first token", style="bold", end="")
    out.print(
        f"; {right} of {len(again)} right, {same} identical word for word, {exact} reused exactly",
        soft_wrap=True,
    )


def _as_dict(comparison: ComparedQuestion) -> dict[str, object]:
    return {
        "question": comparison.asked.question,
        "answer": comparison.reused.as_dict(),
        "again": None if comparison.again is None else comparison.again.as_dict(),
        "full_text": comparison.full.text,
        "right": comparison.is_right(comparison.reused),
        "full_right": comparison.is_right(comparison.full),
        "own_prefill_s": comparison.own_prefill_s,
        "speedup": comparison.speedup,
        "speedup_again": comparison.speedup_again,
    }
