"""The GPU path of cachecraft-rag measured on a Llama-3-8B shape with random weights: exactness first, then speed.

    timeout 600 python -m benchmarks.gpu --json gpu.json    # one GPU with 80 GB; ends within ten minutes
    python -m benchmarks.gpu --tiny                         # a toy model; without a GPU under Triton's interpreter

Made to run unattended: the file is written after each row, a part that fails leaves its error and the next one runs,
and what the time is too short for is named under "left_out". `benchmarks.gpu_where` has the parts that measure one
thing each.

Needs torch, triton, transformers and this package (`pip install --no-deps .` where they are installed). Nothing is
downloaded. The answer of random weights means nothing, but its time and its exactness do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CHUNK, SYSTEM, QUESTION = 512, 32, 64
REFERENCE = Path(__file__).resolve().parents[1] / "tests" / "kernels_gpu" / "reference.py"
TIERS = ("device", "host", "disk")
PARTS = (
    "warm_up",
    "kernels",
    "gates",
    "side_stream",
    "bus",
    "ceilings",
    "attention",
    "copies",
    "passes",
    "steps",
    "traces",
    "new_documents",
    "small_models",
    "lengths",
    "requests",
    "profile",
    "vllm",
)
GPU_ONLY = {
    "warm_up"
}  # of prompts of a thousand tokens, for which Triton's interpreter takes minutes
EXACT = ("kernels", "gates", "side_stream")  # parts whose rows have passed or not
ENGINE_PARTS = {
    "requests",
    "small_models",
    "vllm",
}  # the engine's threads choose torch's inference mode themselves
TARGETS = {"ratio_device": 0.25, "ratio_host": 0.30}  # at 16k tokens, share 0.15; at most
RATES = {"attention_of_stock": 0.60, "gather_of_copy": 0.75}  # at least
TOLERANCE = {"float32": 2e-4, "bfloat16": 2e-2, "float16": 4e-3}  # of a kernel against float64
NOISE = 1.25  # ours may be this many times as far from float32 as the model's own bf16 forward


@dataclass(frozen=True)
class Setting:
    """The machine, the model's shape, lengths, and repetitions of each timing."""

    device: str
    dtype: str
    shape: dict[str, int]
    lengths: Sequence[int]
    chunk: int
    question: int
    share: float
    repeats: int
    deadline: float

    @property
    def on_gpu(self) -> bool:
        """True if a GPU is measured."""
        return self.device == "cuda"

    @property
    def is_late(self) -> bool:
        """True if the time is up."""
        return time.monotonic() > self.deadline


LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = {
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", help="prompt lengths, comma-separated; default 4096,8192,16384")
    parser.add_argument(
        "--share", type=float, default=0.15, help="part of the stored tokens that is recomputed"
    )
    parser.add_argument(
        "--repeats", type=int, default=10, help="timings of which the fastest counts; all are kept"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="no length is begun that would end later"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--parts", help=f"comma-separated; by default all: {', '.join(PARTS)}")
    parser.add_argument(
        "--eager",
        action="store_true",
        help="start vLLM without compiling and without CUDA graphs",
    )
    parser.add_argument("--tiny", action="store_true", help="a toy model, also without a GPU")
    return parser.parse_args(argv)


def chosen_parts(names: str | None) -> Sequence[str]:
    """The parts to run, from comma-separated names; ends the process with a message if there is no such part."""
    if names is None:
        return PARTS
    chosen = names.split(",")
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"no part {', '.join(sorted(unknown))}; choose among {', '.join(PARTS)}")
    return chosen


def setting_of(given: argparse.Namespace) -> Setting:
    """Settings from the command line. Chooses Triton's interpreter where there is no GPU, so it comes before Triton."""
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu and not given.tiny:
        sys.exit("no CUDA device; --tiny runs on a CPU")
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    lengths = [
        int(part)
        for part in (given.tokens or ("48" if given.tiny else "4096,8192,16384")).split(",")
    ]
    return Setting(
        device="cuda" if on_gpu else "cpu",
        dtype="bfloat16" if on_gpu else "float32",
        shape=TINY if given.tiny else LLAMA_8B,
        lengths=lengths,
        chunk=16 if given.tiny else CHUNK,
        question=6 if given.tiny else QUESTION,
        share=given.share,
        repeats=1 if given.tiny else given.repeats,
        deadline=time.monotonic() + 60 * given.minutes,
    )


# -- parts ------------------------------------------------------------------------------------------------------------


def decoder_of(setting: Setting, *, layers: int | None = None, dtype: str | None = None) -> Any:
    """A model of this shape with random weights, made on the device."""
    import torch
    from transformers import LlamaForCausalLM

    from cachecraft_rag.model.decoder import Decoder

    config = config_of(setting.shape | ({"num_hidden_layers": layers} if layers else {}))
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype or setting.dtype))
    torch.manual_seed(0)
    try:
        with torch.device(setting.device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return Decoder(model, byte_tokenizer(), name="random weights", fingerprint="2-" + "0" * 32)


def config_of(shape: dict[str, int], **settings: Any) -> Any:
    """The config of a model of this shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **shape,
        **settings,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )


def byte_tokenizer() -> Any:
    """A tokenizer that needs no file: one token for each byte, and one that ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    turn = "{{ message['role'] }}: {{ message['content'] }}<|end|>"
    tokenizer.chat_template = "{% for message in messages %}" + turn + "{% endfor %}"
    return tokenizer


def seconds(setting: Setting, run: Callable[[], object], *, calls: int = 1) -> float:
    """Fastest seconds of a call, see `series`."""
    return min(series(setting, run, calls=calls))


def series(setting: Setting, run: Callable[[], object], *, calls: int = 1) -> list[float]:
    """Seconds of a call, each measured from an idle device to an idle device; the first call warms up."""
    import torch

    def settle() -> None:
        if setting.on_gpu:
            torch.cuda.synchronize()

    run()
    times = []
    for _ in range(setting.repeats):
        settle()
        started = time.perf_counter()
        for _ in range(calls):
            run()
        settle()
        times.append((time.perf_counter() - started) / calls)
    return times


def best_stock(setting: Setting, run: Callable[[], object], *, calls: int = 1) -> float:
    """Fastest seconds of a call that attends by torch, with the fastest of its kernels for this machine."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not setting.on_gpu:
        return seconds(setting, run, calls=calls)
    times = []
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(kernel):
                times.append(seconds(setting, run, calls=calls))
        # a kernel that this build of torch has not, or not for these shapes
        except RuntimeError as error:
            print(f"{kernel.name} is left out: {str(error).splitlines()[0]}", file=sys.stderr)
    return min(times) if times else seconds(setting, run, calls=calls)


def prompt(setting: Setting, tokens: int) -> tuple[list[int], list[int]]:
    """Random token ids, and the bounds of the instruction, the chunks and the question."""
    import numpy as np

    system = max(
        1,
        tokens
        - setting.question
        - (tokens - setting.question - 1) // setting.chunk * setting.chunk,
    )
    bounds = [0, *range(system, tokens - setting.question + 1, setting.chunk), tokens]
    ids = np.random.default_rng(0).integers(0, setting.shape["vocab_size"], tokens)
    return ids.tolist(), bounds


def job_of(setting: Setting, tokens: int, share: float) -> Any:
    """A prefill that is to take over all chunks; it recomputes a share of their tokens, anywhere in them."""
    import numpy as np

    from cachecraft_rag.compute.job import PrefillJob
    from cachecraft_rag.compute.rows import Rows

    ids, bounds = prompt(setting, tokens)
    inner = np.arange(bounds[1], bounds[-2])
    chosen = np.sort(np.random.default_rng(1).choice(inner, int(share * len(inner)), replace=False))
    new = [*range(bounds[1]), *range(bounds[-2], bounds[-1])]
    rows = Rows.of(bounds, new=new, recomputed=chosen.tolist())
    return PrefillJob(ids, rows, reused=range(1, len(bounds) - 2), drift=0.4)


def first_logits(decoder: Any, job: Any) -> Any:
    """Prefill and the logits of the first answer token."""
    from cachecraft_rag.compute.driver import prefill

    return decoder.next_logits(prefill(decoder, job).hidden)


# -- exactness --------------------------------------------------------------------------------------------------------


def kernels_exact(setting: Setting) -> Iterator[dict[str, Any]]:
    """Each kernel against its float64 reference, in each dtype: the largest error."""
    import torch

    from cachecraft_rag.kernels.gpu.attention import attend
    from cachecraft_rag.kernels.gpu.drift import mean_change, write_rows
    from cachecraft_rag.kernels.gpu.place import place
    from cachecraft_rag.kernels.gpu.received import received
    from cachecraft_rag.kernels.gpu.rope import rotate
    from cachecraft_rag.kernels.visibility import Visibility

    reference = SimpleNamespace(**runpy.run_path(str(REFERENCE)))
    heads, kv_heads = setting.shape["num_attention_heads"], setting.shape["num_key_value_heads"]
    head_dim, keys = setting.shape["hidden_size"] // heads, 1500 if setting.on_gpu else 60
    torch.manual_seed(0)
    rows = torch.randperm(keys, device=setting.device)[: keys // 5].sort().values
    bounds = torch.arange(0, keys + 1, keys // 3, device=setting.device)
    for dtype in ("float32", "bfloat16", "float16"):
        kind = {"dtype": getattr(torch, dtype), "device": setting.device}
        q = torch.randn(len(rows), heads, head_dim, **kind)
        k, v = (torch.randn(keys, kv_heads, head_dim, **kind) for _ in range(2))
        angles = torch.randn(len(rows), head_dim // 2, device=setting.device).repeat(1, 2)
        turn = angles.cos().to(kind["dtype"]), angles.sin().to(kind["dtype"])
        errors = {"rotate": _error(rotate(q, *turn), reference.rotate(q, *turn))}
        part = torch.stack((k, v))[None, :, : len(rows)].contiguous()  # one layer of a chunk-cache
        found, expected = torch.zeros_like(part), torch.zeros_like(part, dtype=torch.float64)
        place(found, [part], [0], cos=turn[0], sin=turn[1])
        reference.place(expected, part, 0, cos=turn[0], sin=turn[1])
        errors["place"] = _error(found, expected)
        owner, shifts = (rows % 3 - 1).int(), part[0, :, :2].transpose(0, 1).float().contiguous()
        owner[:2] = torch.tensor([-2, -3], device=setting.device)
        moved = (k[:2], v[:2], shifts, owner)
        found, expected = part[0].clone(), part[0].double()
        write_rows(found, *moved, cos=turn[0], sin=turn[1])
        reference.write_rows(expected, *moved, cos=turn[0], sin=turn[1])
        errors["write_rows"] = _error(found, expected)
        number = torch.arange(len(rows), dtype=torch.int32, device=setting.device)
        changed = {"rows": number, "positions": number.flip(0), "edges": number[[0, 3, -1]]}
        changed |= {"strength": 0.4, "cos": turn[0], "sin": turn[1]}
        errors["mean_change"] = _error(
            mean_change(part[0], k, v, **changed), reference.mean_change(part[0], k, v, **changed)
        )
        for name, how in (
            ("plain", {}),
            ("window", {"window": keys // 4}),
            ("soft cap", {"softcap": 3.0}),
        ):
            visible = Visibility(rows, window=how.pop("window", None))
            settings = {"scale": head_dim**-0.5, **how}
            ours = attend(q, k, v, visible, bounds=bounds, **settings)
            double = reference.attend(q, k, v, visible, bounds=bounds, **settings)
            errors[f"attention, {name}"] = _error(ours.out, double.out)
            errors[f"mass, {name}"] = _error(ours.mass, double.mass)
            got = received(q, k, ours.lse, visible, **settings)
            right = reference.received(q, k, double.lse, visible, **settings)
            errors[f"received, {name}"] = _error(got, right) / max(1.0, float(right.max()))
        for name, error in errors.items():
            yield {
                "kernel": name,
                "dtype": dtype,
                "error": error,
                "passed": error <= TOLERANCE[dtype],
            }


def _error(found: Any, expected: Any) -> float:
    """The largest difference, in parts of 1 + the right value."""
    return float(((found.double() - expected).abs() / (1 + expected.abs())).max())


def gates(setting: Setting) -> Iterator[dict[str, Any]]:
    """Full prefill and exact reuse on four layers, compared with the same weights in float32.

    A pass is as exact as the model's own forward in its dtype, but for the noise of rounding in another order.
    """
    from cachecraft_rag.compute.driver import prefill
    from cachecraft_rag.compute.job import PrefillJob
    from cachecraft_rag.compute.kv_buffer import ResidentKV
    from cachecraft_rag.compute.rows import Rows

    layers = min(4, setting.shape["num_hidden_layers"])
    decoder = decoder_of(setting, layers=layers)
    ids, bounds = prompt(setting, 4 * setting.chunk + setting.question)
    whole = PrefillJob(ids, Rows.of(bounds, new=range(bounds[-1])), captures=range(len(bounds) - 2))
    first = prefill(decoder, whole)
    taken = [ResidentKV(one.start, one.kv) for one in first.recorder.captures]
    again = prefill(
        decoder, PrefillJob(ids, Rows.of(bounds, new=range(bounds[-2], bounds[-1])), resident=taken)
    )
    rows = setting.question
    found = {
        "everything recomputed": decoder.logits(first.hidden[:, -rows:]),
        "reuse after the same prefix": decoder.logits(again.hidden[:, -rows:]),
    }
    own = decoder.own_logits(ids, keep=rows)
    decoder.model.float()
    right = decoder.own_logits(ids, keep=rows)
    floor = max(
        float((own - right).square().mean().sqrt()), 1e-5 * float(right.square().mean().sqrt())
    )
    for name, logits in found.items():
        noise = float((logits - right).square().mean().sqrt())
        yield {"gate": name, "error": noise, "own_error": floor, "passed": noise <= NOISE * floor}


def warm_up_times(setting: Setting) -> dict[str, Any]:
    """Seconds in which the kernels are compiled, or found in Triton's folder, and those of the same launches again."""
    from cachecraft_rag.compute.warm_up import launch_all

    decoder = decoder_of(setting, layers=2)
    times = []
    for _ in range(2):
        began = time.perf_counter()
        launch_all(decoder)
        times.append(time.perf_counter() - began)
    return {"first_s": times[0], "again_s": times[1]}


def side_stream(setting: Setting, device: str) -> dict[str, Any]:
    """Captures of a prefill on a side stream of a device, compared byte by byte with those on its default stream."""
    import torch

    decoder = decoder_of(replace(setting, device=device), layers=2)
    own = captured_on(decoder, setting, None)
    other = captured_on(decoder, setting, torch.cuda.Stream(device) if setting.on_gpu else None)
    pairs = list(zip(own, other, strict=True))
    return {
        "device": device,
        "captures": len(pairs),
        "passed": bool(pairs) and all(torch.equal(first, second) for first, second in pairs),
    }


def captured_on(decoder: Any, setting: Setting, stream: Any) -> list[Any]:
    """Captured keys and values, copied to the host by a thread on the default stream, as write-back does."""
    import torch

    from cachecraft_rag.compute.driver import prefill
    from cachecraft_rag.compute.job import PrefillJob
    from cachecraft_rag.compute.rows import Rows
    from cachecraft_rag.kernels.gpu.streams import launched, wait_on_stream

    ids, bounds = prompt(setting, 4 * setting.chunk + setting.question)
    job = PrefillJob(ids, Rows.of(bounds, new=range(bounds[-1])), captures=range(len(bounds) - 2))
    with torch.cuda.stream(stream):
        # A prefill ends with a wait. As over tensor-parallel ranks, something is launched after it.
        captures = prefill(decoder, job).recorder.with_all_heads(torch.clone, torch.clone).captures
        computed = launched(decoder.device)

    def copy_all() -> list[Any]:
        with torch.inference_mode():
            for capture in captures:
                wait_on_stream(computed, *capture.tensors())
            return [capture.kv.cpu() for capture in captures]

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copy_all).result()


def bus_rates(setting: Setting) -> dict[str, float]:
    """GB/s of copies to the GPU from pageable and from page-locked memory."""
    import torch

    nbytes = (256 << 20) if setting.on_gpu else 1 << 16
    target = torch.empty(nbytes, dtype=torch.uint8, device=setting.device)
    rates = {}
    for name, pinned in (("pageable", False), ("pinned", setting.on_gpu)):
        source = torch.zeros(nbytes, dtype=torch.uint8)
        if pinned:
            source = source.pin_memory()
        copying_s = seconds(setting, partial(target.copy_, source, non_blocking=True), calls=4)
        rates[f"{name}_gb_per_s"] = nbytes / copying_s / 1e9
    return rates


# -- speed ------------------------------------------------------------------------------------------------------------


def attention_rates(setting: Setting, tokens: int) -> dict[str, float]:
    """TFLOP/s of our attention of scattered rows, and of torch's causal attention with as many operations."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from cachecraft_rag.kernels.attention import attention
    from cachecraft_rag.kernels.visibility import Visibility

    heads, kv_heads = setting.shape["num_attention_heads"], setting.shape["num_key_value_heads"]
    head_dim = setting.shape["hidden_size"] // heads
    kind = {"dtype": getattr(torch, setting.dtype), "device": setting.device}
    rows = (
        torch.randperm(tokens, device=setting.device)[: max(1, int(setting.share * tokens))]
        .sort()
        .values
    )
    q = torch.randn(len(rows), heads, head_dim, **kind)
    k, v = (torch.randn(tokens, kv_heads, head_dim, **kind) for _ in range(2))
    visible = Visibility(rows)
    pairs = float((rows + 1).sum())
    square = max(1, round((2 * pairs) ** 0.5))  # a causal triangle of as many pairs
    a, b, c = (torch.randn(1, heads, square, head_dim, **kind) for _ in range(3))
    calls = 10 if setting.on_gpu else 1
    ours = seconds(setting, lambda: attention(q, k, v, visible, scale=head_dim**-0.5), calls=calls)
    stock = best_stock(
        setting, lambda: scaled_dot_product_attention(a, b, c, is_causal=True), calls=calls
    )
    work = 4 * heads * head_dim * 1e-12
    return {
        "attention_tflops": work * pairs / ours,
        "stock_tflops": work * square * (square + 1) / 2 / stock,
    }


def gather_rates(setting: Setting, tokens: int) -> dict[str, float]:
    """GB/s, read and written, of placing one chunk in all layers, and of a plain copy of as many bytes."""
    import torch

    from cachecraft_rag.kernels.gpu.place import place

    shape = setting.shape
    kv_heads, head_dim = (
        shape["num_key_value_heads"],
        shape["hidden_size"] // shape["num_attention_heads"],
    )
    kind = {"dtype": getattr(torch, setting.dtype), "device": setting.device}
    layers = shape["num_hidden_layers"]
    chunk = torch.randn(layers, 2, setting.chunk, kv_heads, head_dim, **kind)
    merged = torch.empty(layers, 2, tokens, kv_heads, head_dim, **kind)
    angles = torch.randn(tokens, head_dim // 2, device=setting.device).repeat(1, 2)
    cos, sin = angles.cos().to(chunk.dtype), angles.sin().to(chunk.dtype)
    spare = torch.empty_like(chunk)
    calls = 20 if setting.on_gpu else 1
    ours = seconds(
        setting,
        lambda: place(merged, [chunk], [tokens - setting.chunk], cos=cos, sin=sin),
        calls=calls,
    )
    copy = seconds(setting, lambda: spare.copy_(chunk), calls=calls)
    moved = 2e-9 * chunk.nbytes
    return {"gather_gb_s": moved / ours, "copy_gb_s": moved / copy}


class Tiers:
    """Random chunk-caches of one prompt on the device, in main memory (page-locked) and in files."""

    def __init__(self, setting: Setting, decoder: Any, tokens: int, folder: Path) -> None:
        """Make them."""
        import torch

        self._pinned, self._folder, self._bounds = (
            setting.on_gpu,
            folder,
            prompt(setting, tokens)[1],
        )
        shape = decoder.layout.shape(setting.chunk)
        self._host = []
        for number in range(len(self._bounds) - 3):
            kv = torch.randn(shape, device=setting.device).mul_(0.1).to(decoder.dtype)
            self._host.append(kv.cpu().pin_memory() if self._pinned else kv)
            (folder / f"{number}").write_bytes(self._host[-1].view(torch.uint8).numpy().data)
        self._device = setting.device

    def resident(self, tier: str) -> Callable[[], list[Any]]:
        """Makes the chunk-caches as a request finds them in this tier."""
        from cachecraft_rag.compute.kv_buffer import ResidentKV

        def placed(tensors: Sequence[Any]) -> list[Any]:
            return [
                ResidentKV(start, kv) for start, kv in zip(self._bounds[1:], tensors, strict=False)
            ]

        on_device = [kv.to(self._device) for kv in self._host] if tier == "device" else []
        return {
            "device": lambda: placed(on_device),
            "host": lambda: placed(self._host),
            "disk": lambda: placed(self._read()),
        }[tier]

    def _read(self) -> list[Any]:
        import torch

        # torch keeps and reuses it
        room = [torch.empty_like(kv, pin_memory=self._pinned) for kv in self._host]

        def fill(number: int) -> None:
            with open(self._folder / f"{number}", "rb", buffering=0) as file:
                file.readinto(room[number].view(torch.uint8).view(-1).numpy())

        with ThreadPoolExecutor(8) as readers:
            list(readers.map(fill, range(len(room))))
        return room


def ttft(setting: Setting, decoder: Any, tokens: int) -> dict[str, Any]:
    """Seconds to the first logits: the model's own prefill, ours without reuse, and reuse from each tier.

    Ratios compare the fastest times; the series are kept.
    """
    import torch

    from cachecraft_rag.compute.job import PrefillJob
    from cachecraft_rag.compute.rows import Rows

    ids, bounds = prompt(setting, tokens)
    found: dict[str, Any] = {"tokens": tokens}
    everything = PrefillJob(ids, Rows.of(bounds, new=range(tokens)))
    own = best_stock(setting, lambda: decoder.own_logits(ids))
    found["own_s"] = own
    times: dict[str, list[float]] = {}
    times["without_reuse"] = series(setting, lambda: first_logits(decoder, everything))
    job = job_of(setting, tokens, setting.share)
    with tempfile.TemporaryDirectory() as folder:
        tiers = Tiers(setting, decoder, tokens, Path(folder))
        for tier in TIERS:
            chunks = tiers.resident(tier)

            def reuse(chunks: Callable[[], list[Any]] = chunks) -> None:
                first_logits(decoder, replace(job, resident=chunks()))

            times[tier] = series(setting, reuse)
    found |= {f"ratio_{name}": min(values) / own for name, values in times.items()}
    found["series_ms"] = {
        name: [round(1e3 * seconds, 2) for seconds in values] for name, values in times.items()
    }
    found["token_ratio"] = len(job.rows.open()) / tokens
    if setting.on_gpu:
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
    return found


def requests(setting: Setting, decoder: Any, tokens: int) -> dict[str, Any]:
    """Seconds to the first token of whole requests to the engine: planning, loading, computing and sampling.

    The chunks are text of the sample handbook, captured after other neighbours than in the measured prompt.
    """
    from benchmarks.first_token import Shape, run

    # The instruction and the template alone are some 130 bytes, and each is a token here.
    shape = Shape.of_prompt(max(tokens, 200), longest=max(setting.chunk, 50))
    (report,) = run(decoder, [shape], ratio=setting.share, pairs=setting.repeats)
    return {
        "tokens": report.prompt_tokens,
        "own_s": report.own_prefill_s,
        "ratio_device": report.ratio_device,
        "ratio_host": report.ratio_host,
        "ratio_disk": report.ratio_disk,
        "ratio_without_reuse": report.ratio_all_recomputed,
        "token_ratio": report.token_ratio,
        "decode_ms": report.decode_ms,
    }


def vllm_requests(setting: Setting, decoder: Any, *, eager: bool) -> Iterator[dict[str, Any]]:
    """A row for each prompt length, once the model of the other parts has left the GPU; see `gpu_vllm`."""
    import gc

    import torch

    from benchmarks import gpu_vllm

    decoder.cache_clear()
    gc.collect()
    if setting.on_gpu:
        torch.cuda.empty_cache()
    # the instruction and the template alone are some 130 tokens
    lengths = [max(tokens, 512) for tokens in setting.lengths]
    wanted = replace(setting, lengths=lengths)
    with gpu_vllm.started(wanted, eager=eager or not setting.on_gpu) as engine:
        yield from by_length(wanted, lambda: engine, gpu_vllm.requests)


def profile_rows(setting: Setting, decoder: Any, tokens: int) -> list[dict[str, Any]]:
    """Time of each operation in one prefill with chunk-caches on the device, the longest first.

    The first rows are the whole call without profiler ("wall") and the sum over all operations.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    job = job_of(setting, tokens, setting.share)
    with tempfile.TemporaryDirectory() as folder:
        chunks = Tiers(setting, decoder, tokens, Path(folder)).resident("device")

        def reuse() -> None:
            first_logits(decoder, replace(job, resident=chunks()))

        wall = seconds(setting, reuse)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
        with profile(activities=kinds) as recorded:
            reuse()
            if setting.on_gpu:
                torch.cuda.synchronize()
    rows = [
        {
            "operation": event.key[:70],
            "calls": event.count,
            # An operation also carries the time of its kernels, which have rows of their own.
            "device_ms": event.self_device_time_total / 1e3 if _is_kernel(event) else 0.0,
            "processor_ms": event.self_cpu_time_total / 1e3,
        }
        for event in recorded.key_averages()
    ]
    sums = [
        {"operation": "wall", "calls": 1, "device_ms": 1e3 * wall, "processor_ms": 1e3 * wall},
        {
            "operation": "sum",
            "calls": sum(row["calls"] for row in rows),
            "device_ms": sum(row["device_ms"] for row in rows),
            "processor_ms": sum(row["processor_ms"] for row in rows),
        },
    ]
    longest = sorted(rows, key=lambda row: -row["device_ms"])[:20]
    slowest = sorted(rows, key=lambda row: -row["processor_ms"])[:20]
    return [*sums, *longest, *(row for row in slowest if row not in longest)]


def _is_kernel(event: Any) -> bool:
    """True for a kernel or copy on the device, False for an operation of the processor."""
    return "CUDA" in str(event.device_type)


# -- report -----------------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as aligned columns."""
    names = [name for name in rows[0] if name != "series_ms"]  # too long; the file has them
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def targets(lengths: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Targets at 16k tokens (or the nearest length that ran), and the results."""
    at = min(lengths, key=lambda row: abs(row["tokens"] - 16384))
    reached = {
        "ratio_device": at["ratio_device"],
        "ratio_host": at["ratio_host"],
        "attention_of_stock": at["attention_tflops"] / at["stock_tflops"],
        "gather_of_copy": at["gather_gb_s"] / at["copy_gb_s"],
    }
    rows = [(name, reached[name], most, reached[name] <= most) for name, most in TARGETS.items()]
    rows += [(name, reached[name], least, reached[name] >= least) for name, least in RATES.items()]
    return [
        {"target": a, "reached": b, "limit": c, "met": d, "tokens": at["tokens"]}
        for a, b, c, d in rows
    ]


class OutOfTimeError(Exception):
    """The time is up; the text names what is left out."""


class Report:
    """The figures so far. They are written after every row, and a part that fails leaves its error and its rows.

    Args:
        path: file to write; None = no file.
        machine: facts about the machine.
        is_late: returns True once the time is up: then no part begins and no further row is measured.
    """

    def __init__(
        self,
        path: Path | None,
        machine: dict[str, Any],
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        self._path = path
        self._is_late = is_late
        self.figures: dict[str, Any] = {"machine": machine, "errors": {}, "left_out": []}

    def part(self, name: str, title: str, rows: Callable[[], Iterator[dict[str, Any]]]) -> None:
        """Measure one part: keep its rows, write the file after each, and print them as a table."""
        kept = self.figures[name] = []
        print(f"\n{title}", flush=True)
        began = time.perf_counter()
        try:
            self._keep(kept, rows)
        except OutOfTimeError as error:
            print(f"The time is up: {error} is left out")
            self.figures["left_out"].append(f"{name}: {error}")
        except Exception as error:  # noqa: BLE001  # whatever it is, the other parts are measured
            traceback.print_exc()
            self.figures["errors"][name] = f"{type(error).__name__}: {error}"
        self.figures.setdefault("part_s", {})[name] = round(time.perf_counter() - began, 1)
        self.write()
        if kept:
            print(table(kept), flush=True)

    def _keep(
        self, kept: list[dict[str, Any]], rows: Callable[[], Iterator[dict[str, Any]]]
    ) -> None:
        self._check_time()
        for row in rows():
            kept.append(row)
            self.write()
            self._check_time()

    def _check_time(self) -> None:
        if self._is_late():
            raise OutOfTimeError("what follows")

    def write(self) -> None:
        """Write the figures to the file."""
        if self._path is not None:
            self._path.write_text(json.dumps(self.figures, indent=1))

    @property
    def is_exact(self) -> bool:
        """True if no part failed and everything that was compared is exact."""
        rows = [row for part in EXACT for row in self.figures.get(part, ())]
        return not self.figures["errors"] and all(row["passed"] for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; 1 where something is not exact, or a part has failed."""
    given = arguments(argv)
    setting = setting_of(given)
    import torch
    import transformers
    import triton

    machine = {
        "device": torch.cuda.get_device_name() if setting.on_gpu else "cpu, Triton's interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "dtype": setting.dtype,
        "share": setting.share,
    }
    print(*(f"{name} {value}" for name, value in machine.items()), sep=", ")
    report = Report(given.json, machine, lambda: setting.is_late)
    parts = parts_of(setting, given)
    assert set(parts) == set(PARTS)
    for name in chosen_parts(given.parts):
        if name == "vllm" and importlib.util.find_spec("vllm") is None:
            print("\nvLLM is not installed: its part is left out")
            continue
        if name in GPU_ONLY and not setting.on_gpu:
            continue
        title, rows = parts[name]
        with torch.inference_mode(name not in ENGINE_PARTS):
            report.part(name, title, rows)
    if report.figures.get("lengths"):
        report.figures["targets"] = targets(report.figures["lengths"])
        report.write()
        print("\nTargets (of a GPU)", table(report.figures["targets"]), sep="\n")
    for name, error in report.figures["errors"].items():
        print(f"{name} failed: {error}")
    return 0 if report.is_exact else 1


Part = tuple[str, Callable[[], Iterator[dict[str, Any]]]]


def parts_of(setting: Setting, given: argparse.Namespace) -> dict[str, Part]:
    """The title and the rows of each part, by its name."""
    whole = cache(partial(decoder_of, setting))  # made by the first part that needs it
    return (
        _exact_parts(setting)
        | _where_parts(setting, whole, given)
        | _ratio_parts(setting, whole, given)
    )


def _exact_parts(setting: Setting) -> dict[str, Part]:
    import torch

    numbers = range(torch.cuda.device_count())
    devices = [f"cuda:{number}" for number in numbers] if setting.on_gpu else ["cpu"]
    return {
        "warm_up": ("Compiling the kernels", lambda: iter([warm_up_times(setting)])),
        "kernels": ("Kernels against float64", lambda: kernels_exact(setting)),
        "gates": ("Gates", lambda: gates(setting)),
        "side_stream": (
            "Captures on a side stream",
            lambda: (side_stream(setting, device) for device in devices),
        ),
        "bus": ("Copies to the GPU", lambda: iter([bus_rates(setting)])),
    }


def _where_parts(
    setting: Setting, whole: Callable[[], Any], given: argparse.Namespace
) -> dict[str, Part]:
    from benchmarks import gpu_where

    folder = given.json.absolute().parent if given.json else None
    shortest = min(setting.lengths)
    return {
        "ceilings": ("What the machine can do", lambda: gpu_where.ceilings(setting)),
        "attention": ("Attention over sets of rows", lambda: gpu_where.attention_sets(setting)),
        "copies": ("Copying and placing chunk-caches", lambda: gpu_where.copies(setting)),
        "passes": ("Passes and probe", lambda: by_length(setting, whole, gpu_where.passes)),
        "steps": (
            "Requests in a row through the connector",
            lambda: by_length(setting, whole, gpu_where.steps),
        ),
        "traces": (
            f"Traces of {shortest} tokens",
            lambda: gpu_where.traces(setting, whole(), shortest, folder),
        ),
        "new_documents": (
            "Prefills of new documents",
            lambda: by_length(setting, whole, gpu_where.new_documents),
        ),
        "small_models": ("Small models", lambda: gpu_where.small_models(setting)),
    }


def _ratio_parts(setting: Setting, whole: Any, given: argparse.Namespace) -> dict[str, Part]:
    middle = sorted(setting.lengths)[len(setting.lengths) // 2]
    return {
        "lengths": ("Prefill by prompt length", lambda: by_length(setting, whole, length_row)),
        "profile": (
            f"Operations of a prefill of {middle} tokens",
            lambda: iter(profile_rows(setting, whole(), middle)),
        ),
        "requests": (
            "Whole requests by prompt length",
            lambda: by_length(setting, whole, requests),
        ),
        "vllm": (
            "Whole requests to vLLM by prompt length",
            lambda: vllm_requests(setting, whole, eager=given.eager),
        ),
    }


def by_length(
    setting: Setting,
    decoder: Callable[[], Any],
    measure: Callable[[Setting, Any, int], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """A row for each prompt length, and one more for the first, as long as there is time."""
    made = decoder()
    spent = 0.0
    # The first length again at the end: one-off costs would make it slower than the second time.
    for tokens in (*setting.lengths, *(setting.lengths[:1] if len(setting.lengths) > 1 else ())):
        started = time.monotonic()
        # the next one is twice as long
        if started + 3 * spent > setting.deadline:
            raise OutOfTimeError(f"{tokens} tokens and all after them")
        yield measure(setting, made, tokens)
        spent = time.monotonic() - started


def length_row(setting: Setting, decoder: Any, tokens: int) -> dict[str, Any]:
    """Times of prefills of one length, and rates of the kernels in them."""
    rates = attention_rates(setting, tokens) | gather_rates(setting, tokens)
    return ttft(setting, decoder, tokens) | rates


if __name__ == "__main__":
    sys.exit(main())
