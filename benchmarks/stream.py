"""A stream of questions in which some come again and again: what is recomputed, and at which loss, as time goes on.

Popularity follows Zipf's law. After each question the engine has time to idle, so what it learns depends on nothing but
the questions and the budget. With `--new-orders` the passages of a question come in a new order each time: a repeated
question then is no repeated prefix, as in the paper's trace, where prefixes make up 18 % of the tokens (Cache-Craft
Fig. 24). What prefix caching without a limit would compute of the same requests is counted beside it.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from benchmarks import formats
from benchmarks.shared_options import NEAREST_SHARE, NearestShare
from benchmarks.traffic import Zipf
from benchmarks.variant_counts import variant_counts, variants_per_chunk
from cachecraft_rag.checks import FINITE, MOST, check_number, check_whole
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import print_json, progress_bar
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.dataset import EvaluationQuestion, handbook_dataset, load_dataset
from cachecraft_rag.evaluation.measuring import Reference, reference_of
from cachecraft_rag.evaluation.metrics import divergence
from cachecraft_rag.observability.stats import RequestStats
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.progress import Progress
from cachecraft_rag.vllm.engine import VLLMEngine

if TYPE_CHECKING:
    from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The requests of a stream.

    requests       that are counted, after `warmup` others (Cache-Craft §5.1.2: 20)
    window         requests in one line of the report; divides `requests`
    exponent       of Zipf's law: the n-th most popular question is asked 1 / n^exponent as often as the first
    answer_tokens  longest answer, in tokens
    new_orders     draw the order of the passages for each request
    with_kl        compare with full prefill; in process only
    """

    requests: int = 200
    warmup: int = 20
    window: int = 50
    exponent: float = 1.0
    answer_tokens: int = 8
    seed: int = 0
    new_orders: bool = False
    with_kl: bool = True

    def __post_init__(self) -> None:
        """Check the ranges; raises ConfigError."""
        for name in ("requests", "window", "answer_tokens"):
            check_whole(name, getattr(self, name), least=1)
        check_whole("warmup", self.warmup)
        check_number("exponent", self.exponent, most=FINITE)
        if self.requests % self.window:
            raise ConfigError(
                f"{self.requests} requests are no multiple of the window of {self.window}"
            )


@dataclass(frozen=True, slots=True)
class Window:
    """Some requests in a row, and the store after them. Tokens are those of chunks.

    reused, recomputed, computed   taken over untouched; fixed; computed afresh
    prefix_computed    that prefix caching would compute: those after the longest prefix that was asked for before
    chunks, hits       asked for; found in the store
    all_hit            requests whose chunks were all found
    overlap            mean β′ of the chunks that were taken from the store
    kl                 mean divergence from full prefill along its answer, nats; None if it was not measured, and over
                       vLLM, which gives no logits
    new_variants       captured by then in the background, and the tokens computed for them
    variants           by then, how many chunks have how many variants
    """

    requests: int
    reused: int
    recomputed: int
    computed: int
    overlap: float
    kl: float | None
    new_variants: int
    idle_tokens: int
    variants: dict[int, int]
    prefix_computed: int
    chunks: int
    hits: int
    all_hit: int

    @property
    def of_prefix_caching(self) -> float:
        """Tokens computed / those that prefix caching would compute."""
        return (self.recomputed + self.computed) / max(self.prefix_computed, 1)

    @property
    def variants_per_chunk(self) -> float:
        """The mean."""
        return variants_per_chunk(self.variants)


@dataclass(frozen=True, slots=True)
class StreamReport:
    """The windows in order, and the questions that were drawn from.

    ratio               tokens recomputed in the last window / in the first; None where the first recomputed none
    kl_ratio            the same of KL
    warmup_idle_tokens  tokens computed in idle time before the first window; those of the windows include them
    """

    windows: tuple[Window, ...]
    questions: int
    model: str
    dtype: str
    warmup_idle_tokens: int = 0

    @property
    def ratio(self) -> float | None:
        """Tokens recomputed in the last window / in the first."""
        first, last = self.windows[0].recomputed, self.windows[-1].recomputed
        return last / first if first else None

    @property
    def kl_ratio(self) -> float | None:
        """KL in the last window / in the first."""
        first, last = self.windows[0].kl, self.windows[-1].kl
        return last / first if first and last is not None else None


def over_seeds(reports: Sequence[StreamReport]) -> dict[str, list[float]]:
    """Return what Cache-Craft Fig. 24 shows, one value for each seed.

    - `chunk hits`, `requests with all chunks`: shares, in the first window and in the last
    - `of prefix caching`: tokens computed for requests / those that prefix caching would compute, over the stream;
      `with idle tokens` also counts those computed for new variants
    - `last / first`: tokens computed in the last window / in the first
    - `variants of a chunk`, `most variants`: in the store after the stream (Cache-Craft Fig. 25)
    """

    def whole(report: StreamReport, name: str) -> int:
        return sum(getattr(window, name) for window in report.windows)

    def computed(report: StreamReport) -> int:
        return whole(report, "recomputed") + whole(report, "computed")

    found: dict[str, list[float]] = {}
    for report in reports:
        first, last = report.windows[0], report.windows[-1]
        prefix = max(whole(report, "prefix_computed"), 1)
        row = {
            "chunk hits, first window": first.hits / first.chunks,
            "chunk hits, last window": last.hits / last.chunks,
            "requests with all chunks, first window": first.all_hit / first.requests,
            "requests with all chunks, last window": last.all_hit / last.requests,
            "of prefix caching": computed(report) / prefix,
            "with idle tokens": (computed(report) + last.idle_tokens - report.warmup_idle_tokens)
            / prefix,
            "last / first": (last.recomputed + last.computed)
            / max(first.recomputed + first.computed, 1),
            "variants of a chunk": last.variants_per_chunk,
            "most variants": max(last.variants, default=0),
        }
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return found


def questions_of(
    data: Path | None, *, passages: int, limit: int, seed: int
) -> tuple[EvaluationQuestion, ...]:
    """The sample handbook's questions and `limit` of a file's. Errors as `dataset.load_dataset`."""
    found = handbook_dataset(passages=passages, limit=None, seed=seed).questions
    if data is None:
        return found
    return (
        found
        + load_dataset(data, passages=passages, limit=limit, seed=seed, read=formats.read).questions
    )


def draw(
    questions: Sequence[EvaluationQuestion], settings: StreamSettings
) -> list[EvaluationQuestion]:
    """The warm-up and the stream, the same for the same seed."""
    dice = random.Random(settings.seed)
    ranked = list(questions)
    dice.shuffle(ranked)
    popular = Zipf(len(ranked), exponent=settings.exponent)
    drawn = [ranked[popular.draw(dice)] for _ in range(settings.warmup + settings.requests)]
    if not settings.new_orders:
        return drawn
    return [
        replace(question, passages=tuple(dice.sample(question.passages, len(question.passages))))
        for question in drawn
    ]


def run(
    engine: Engine | VLLMEngine,
    questions: Sequence[EvaluationQuestion],
    settings: StreamSettings,
    *,
    config: ReuseConfig | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> StreamReport:
    """Ask them all.

    Args:
        engine: over an empty store, opened with `best_last=False`, because passages are in prompt order already; over
            vLLM without vLLM's own prefix cache, which would answer for the chunk-caches.
        config: how chunk-caches are reused; None: the engine's own.
    """
    asked = draw(questions, settings)
    references: dict[tuple[str, ...], Reference] = {}
    windows: list[Window] = []
    prefixes: set[tuple[str, ...]] = set()
    counted = _Counts(prefixes)
    warmup_idle_tokens = 0
    for number, question in enumerate(asked):
        progress(Progress(number, len(asked), "warm-up" if number < settings.warmup else "stream"))
        if isinstance(engine, Engine) and settings.with_kl:
            key = (question.question_id, *(chunk.chunk_id for chunk in question.passages))
            if (reference := references.get(key)) is None:
                reference = reference_of(engine, question, answer_tokens=settings.answer_tokens)
                references[key] = reference
            counted.ask(engine, reference, config)
        else:
            sampling = SamplingParams(max_new_tokens=settings.answer_tokens)
            answer = engine.stream(
                question.text, question.passages, sampling=sampling, config=config
            )
            deque(answer, maxlen=0)
            counted.add(answer.stats)
        engine.settle()
        place = number + 1 - settings.warmup
        if place >= 0 and place % settings.window == 0:
            if place:
                windows.append(counted.window(engine))
            else:
                warmup_idle_tokens = engine.new_variants.stats.tokens
            counted = _Counts(prefixes)
    return StreamReport(
        tuple(windows),
        len(questions),
        engine.decoder.name,
        engine.decoder.layout.dtype,
        warmup_idle_tokens,
    )


class _Counts:
    """The sums of one window.

    Args:
        prefixes: the prefixes that requests before had, which this adds to.
    """

    def __init__(self, prefixes: set[tuple[str, ...]]) -> None:
        self._prefixes = prefixes
        self._requests = 0
        self._tokens: Counter[str] = Counter()
        self._kl: list[float] = []
        self._overlaps: list[float] = []
        self._chunks = self._hits = self._all_hit = self._prefix_computed = 0

    def ask(self, engine: Engine, reference: Reference, config: ReuseConfig | None) -> None:
        question, full = reference.question, reference.answer
        found = engine.score_answer(
            question.text,
            question.passages,
            target=full.tokens,
            max_new_tokens=reference.answer_tokens,
            config=config,
        )
        self._kl.append(divergence(full.logits, found.logits)[0])
        self.add(found.stats)

    def add(self, stats: RequestStats) -> None:
        self._requests += 1
        for chunk in stats.chunks:
            self._tokens["recomputed"] += chunk.recomputed
            self._tokens["computed"] += chunk.computed
            self._tokens["reused"] += chunk.tokens - chunk.recomputed - chunk.computed
            if chunk.beta_prime is not None:
                self._overlaps.append(chunk.beta_prime)
        found = [chunk.outcome in ("exact", "reused") for chunk in stats.chunks]
        self._chunks += len(found)
        self._hits += sum(found)
        self._all_hit += all(found)
        ids = [chunk.chunk_id for chunk in stats.chunks]
        begun = [tuple(ids[:length]) for length in range(1, len(ids) + 1)]
        known = sum(prefix in self._prefixes for prefix in begun)
        self._prefix_computed += sum(chunk.tokens for chunk in stats.chunks[known:])
        self._prefixes.update(begun)

    def window(self, engine: Engine | VLLMEngine) -> Window:
        stats = engine.new_variants.stats
        engine.store.flush()
        return Window(
            requests=self._requests,
            reused=self._tokens["reused"],
            recomputed=self._tokens["recomputed"],
            computed=self._tokens["computed"],
            overlap=sum(self._overlaps) / max(len(self._overlaps), 1),
            kl=sum(self._kl) / len(self._kl) if self._kl else None,
            new_variants=stats.captured,
            idle_tokens=stats.tokens,
            variants=variant_counts(engine),
            prefix_computed=self._prefix_computed,
            chunks=self._chunks,
            hits=self._hits,
            all_hit=self._all_hit,
        )


def main(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="More questions with passages: a SQuAD or XQuAD file, or another known form.",
        ),
    ] = None,
    model: options.Model = "demo",
    dtype: options.Dtype = "float32",
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="Requests that are counted.")
    ] = 200,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Requests before them.")] = 20,
    window: Annotated[
        int, typer.Option("--window", min=1, help="Requests in one line of the table.")
    ] = 50,
    questions: Annotated[
        int, typer.Option("--questions", min=1, help="Questions drawn from --data.")
    ] = 60,
    passages: Annotated[int, typer.Option("--passages", min=2, help="Chunks in each prompt.")] = 5,
    zipf: Annotated[
        float, typer.Option("--zipf", min=0.0, help="Exponent of the questions' popularity.")
    ] = 1.0,
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", min=1, help="Longest answer.")
    ] = 8,
    new_variants: Annotated[str, options.option_of("new_variants")] = "idle",
    share: Annotated[
        float,
        typer.Option(
            "--new-variants-share",
            min=0.0,
            help="Tokens computed for new variants, per prompt token.",
        ),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option("--seed", min=-MOST - 1, max=MOST, help="Seed of the stream.")
    ] = 0,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Streams to ask, of this seed and the next ones.")
    ] = 1,
    new_orders: Annotated[
        bool, typer.Option("--new-orders", help="Draw the passages' order for each request.")
    ] = False,
    with_kl: Annotated[
        bool, typer.Option("--kl/--no-kl", help="Compare each answer with full prefill's.")
    ] = True,
    nearest_share: NearestShare = NEAREST_SHARE,
    threads: options.Threads = None,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Over vLLM, its prefix cache off; no KL.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """A stream of repeated questions: tokens recomputed, divergence from full prefill, and variants per chunk.

    Asks the sample handbook's questions, and those of --data. With the demo model it takes about half an hour on one
    thread, most of it for full prefill.
    """
    options.set_threads(threads)
    options.quiet_libraries()
    # with Cake's loading the numbers would depend on how fast the disk is just now
    reuse = ReuseConfig(nearest_share=nearest_share, method=ReuseMethod(loading="layerwise"))
    reports = []
    for each in range(seed, seed + seeds):
        settings = StreamSettings(
            requests=requests,
            warmup=warmup,
            window=window,
            exponent=zipf,
            answer_tokens=answer_tokens,
            seed=each,
            new_orders=new_orders,
            with_kl=with_kl,
        )
        asked = questions_of(data, passages=passages, limit=questions, seed=each)
        making = (new_variants, share)
        reports.append(
            _stream(model, asked, settings, reuse, dtype=dtype, vllm=vllm, making=making)
        )
    found = [
        asdict(report) | {"ratio": report.ratio, "kl_ratio": report.kl_ratio} for report in reports
    ]
    if as_json:
        several = {"streams": found, "by seed": over_seeds(reports)}
        print_json(found[0] if seeds == 1 else several)
        return
    for report in reports:
        print_stream(report)
    table = Table("of each seed", *(str(each) for each in range(seed, seed + seeds)))
    for name, values in over_seeds(reports).items():
        table.add_row(name, *(f"{value:.2f}" for value in values))
    out.print(table)


def _stream(
    model: str,
    asked: Sequence[EvaluationQuestion],
    settings: StreamSettings,
    reuse: ReuseConfig,
    *,
    dtype: str,
    vllm: bool,
    making: tuple[str, float],
) -> StreamReport:
    """Ask one stream over an empty store."""
    with progress_bar("Stream") as show, ExitStack() as opened:
        from cachecraft_rag.evaluation.runner import open_engine
        from cachecraft_rag.serving.config import NewVariants

        new_variants = NewVariants(*making)  # type: ignore[arg-type]  # it checks the word
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="cachecraft-bench-")))
        engine: Engine | VLLMEngine
        if vllm:
            server = {"enable_prefix_caching": False, "enforce_eager": True}
            over_vllm = ReuseConfig(nearest_share=reuse.nearest_share)
            own: Any = {"dtype": dtype, "best_last": False, "new_variants": new_variants}
            engine = opened.enter_context(
                VLLMEngine.from_pretrained(
                    model, store=folder, server=server, reuse=over_vllm, **own
                )
            )
        else:
            engine = opened.enter_context(
                open_engine(model, folder, dtype=dtype, new_variants=new_variants)
            )
        return run(engine, asked, settings, config=None if vllm else reuse, progress=show)


def print_stream(report: StreamReport) -> None:
    """The windows, and the last compared with the first."""
    table = Table(
        "requests",
        "hits",
        "recomputed",
        "computed",
        "of prefix caching",
        "reused",
        "β′",
        "KL",
        "new variants",
        "idle tokens",
        "per chunk",
    )
    first = 1
    for window in report.windows:
        most = max(window.variants, default=0)
        table.add_row(
            f"{first}–{first + window.requests - 1}",
            f"{window.hits} of {window.chunks}",
            f"{window.recomputed:,}",
            f"{window.computed:,}",
            f"{window.of_prefix_caching:.2f}",
            f"{window.reused:,}",
            f"{window.overlap:.2f}",
            "–" if window.kl is None else f"{window.kl:.4f}",
            f"{window.new_variants:,}",
            f"{window.idle_tokens:,}",
            f"{window.variants_per_chunk:.1f}, at most {most}",
        )
        first += window.requests
    out.print(table)
    ratio = "–" if report.ratio is None else f"{report.ratio:.2f}"
    kl = "–" if report.kl_ratio is None else f"{report.kl_ratio:.2f}"
    spread = ", ".join(f"{n}: {chunks}" for n, chunks in report.windows[-1].variants.items())
    out.print(
        f"Last / first: {ratio} of the tokens recomputed, {kl} of the KL. Chunks by number of variants: {spread}"
    )
    out.print(f"{report.questions} questions; {report.model}, {report.dtype}")
