"""`python -m benchmarks ttft`: time to the first token, reuse against the model's own prefill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from cachecraft_rag.checks import MOST, check_number, check_whole
from cachecraft_rag.cli import options
from cachecraft_rag.cli.console import out
from cachecraft_rag.cli.options import numbers, print_json, print_table, progress_bar, takes
from cachecraft_rag.planning.config import ReuseConfig

if TYPE_CHECKING:
    from benchmarks.first_token import TtftReport
    from cachecraft_rag.compute.timing import Part

_LEAST_S = 1e-3  # a part that takes less has no ratio worth reading


@dataclass(frozen=True)
class TtftOptions:
    """Options of the comparison.

    chunks           chunks in the prompt, at least 2
    chunk_tokens     length of each
    tokens           instead of --chunks: lengths of whole prompts, comma-separated
    recompute_ratio  recompute ratio
    nearest_share    see `ReuseConfig`; 0 never recomputes the last chunk in full
    pairs            runs of each side, alternating
    seed             seed of torch; the prompt is always the same
    profile          show where the time goes, part by part
    peers            other engines, prefilling in turn, comma-separated: openvino (pip install openvino-genai)
    """

    model: str = "demo"
    dtype: str = "auto"
    chunks: int = 5
    chunk_tokens: int = 400
    tokens: str | None = None
    recompute_ratio: float = 0.15
    nearest_share: float = ReuseConfig().nearest_share
    pairs: int = 7
    threads: options.Threads = None
    seed: int | None = None
    profile: bool = False
    peers: str | None = None

    def __post_init__(self) -> None:
        """Check the numbers; raises ConfigError."""
        check_whole("--chunk-tokens", self.chunk_tokens, least=16, most=1 << 20)
        check_number("--recompute-ratio", self.recompute_ratio, most=1)
        check_number("--nearest-share", self.nearest_share, most=1)
        check_whole("--seed", self.seed, least=-MOST - 1, optional=True)

    def run(self) -> list[TtftReport]:
        """Measure each length."""
        options.set_threads(self.threads)
        with progress_bar("Benchmark") as show:
            import torch

            from benchmarks.first_token import Shape, run
            from benchmarks.peers import maker_of

            peers = {name: maker_of(name) for name in self.peers.split(",")} if self.peers else {}
            shapes = [Shape(self.chunks, self.chunk_tokens)]
            if self.tokens is not None:
                lengths = [int(length) for length in numbers(self.tokens)]
                shapes = [Shape.of_prompt(length, longest=self.chunk_tokens) for length in lengths]
            if self.seed is not None:
                torch.manual_seed(self.seed)
            options.quiet_libraries()
            return run(
                self.model,
                shapes,
                dtype=self.dtype,
                peers=peers,
                progress=show,
                ratio=self.recompute_ratio,
                nearest_share=self.nearest_share,
                pairs=self.pairs,
                profile=self.profile,
            )


@takes(chosen=TtftOptions)
def main(as_json: options.Json = False, *, chosen: TtftOptions) -> None:
    """Time to the first token: reuse against the model's own prefill, side by side.

    With --dtype auto both sides use the dtype in which the model's own prefill is fastest on this machine.
    """
    reports = chosen.run()
    if as_json:
        alone = asdict(reports[0]) if len(reports) == 1 else {}
        print_json(alone | {"lengths": [asdict(report) for report in reports]})
    else:
        for report in reports:
            print_ttft(report)


def print_ttft(report: TtftReport) -> None:
    """The times of all sides, and what was measured."""
    rows = [
        ("model's own prefill", report.own_prefill_s),
        *([("reuse, from the GPU", report.device_s)] if report.device_s is not None else []),
        ("reuse, from memory", report.host_s),
        ("reuse, from disk", report.disk_s),
        ("reuse, early termination", report.early_termination_s),
        ("everything recomputed", report.all_recomputed_s),
        *((f"whole prefill by {name}", seconds) for name, seconds in report.peers.items()),
    ]
    print_table(
        ("side", "TTFT (median)", "ratio"),
        [
            (name, f"{seconds:.3f} s", f"{seconds / report.own_prefill_s:.3f}")
            for name, seconds in rows
        ],
        numbers=True,
    )
    out.print(
        f"{report.prompt_tokens} tokens, {report.chunks} chunks, r = {report.recompute_ratio}, rows computed "
        f"{report.token_ratio:.3f} of all; {report.model}, {report.dtype}, {report.threads} threads, "
        f"kernels: {report.kernels}, {report.pairs} pairs"
    )
    if report.decode_ms is not None:
        out.print(
            f"{report.decode_ms:.1f} ms for each further token, 64 tokens after {report.to_64_tokens_s:.2f} s"
        )
    for name, step in report.peers_decode_ms.items():
        out.print(f"{name}: {step:.1f} ms and {report.peers_to_64_tokens_s[name]:.2f} s")
    if report.parts is not None and report.parts_all_recomputed is not None:
        print_parts(report.parts, report.parts_all_recomputed)


def print_parts(reused: Mapping[Part, float], full: Mapping[Part, float]) -> None:
    """Seconds of each part, with reuse from memory and with everything computed."""
    rows: list[tuple[str, float, float]] = [
        (part, seconds, full[part]) for part, seconds in reused.items()
    ]
    rows.append(("together", sum(reused.values()), sum(full.values())))
    print_table(
        ("part", "reuse", "everything", "ratio"),
        [
            (
                part,
                f"{1000 * seconds:.1f} ms",
                f"{1000 * whole:.1f} ms",
                f"{seconds / whole:.3f}" if whole > _LEAST_S else "–",
            )
            for part, seconds, whole in rows
        ],
        numbers=True,
    )
