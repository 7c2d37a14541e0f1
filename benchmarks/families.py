"""Scan of the causal-LM families of the installed transformers: which are served, and why others are refused.

Each family is built as a tiny random model, loaded as any model is, and compared with its own forward: a chunk reused
after its own prefix, moved chunks recomputed at ratio 1, prompts that end around the edge of a sliding window, and the
tokens of an answer, in float32; the self-check also in bfloat16. The CSV is the source of docs/models.md.
"""

from __future__ import annotations

import csv
import gc
import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cachecraft_rag.compute.decode import extend
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob, PrefillResult
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.errors import UnsupportedModelError
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.model.self_check import self_check

MOST_PARAMETERS = 60_000_000
WINDOW = 24
LARGEST_ERROR = 1e-3  # of a logit, in float32
ANSWER_TOKENS = 6

# Sizes that most configs know by these names. What a config does not know is left out.
SMALL: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 256,
}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,  # of the part that is rotated
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LONGROPE = {
    "original_max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
        "long_factor": [4.0] * 8,
    },
}

# Settings that a family needs besides `SMALL`, by its model type.
SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT,
    "glm4_moe_lite": _LATENT,
    "kimi_linear": _LATENT,
    "longcat_flash": _LATENT,
    "minicpm3": _LATENT,
    "youtu": _LATENT,
    "axk1": _LATENT,
    "gemma4_text": {
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 260,
    },
    "gemma3n_text": {
        "vocab_size_per_layer_input": 260,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "glm4_moe": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}

# Further forms of a family, by a name of their own.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3 (LongRoPE)": ("phi3", _LONGROPE),
    "phi3 (LongRoPE, partial rotary)": (
        "phi3",
        {
            "original_max_position_embeddings": 512,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {
                **_LONGROPE["rope_parameters"],  # type: ignore[dict-item]
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
                "long_factor": [4.0] * 6,
            },
        },
    ),
    "phimoe (LongRoPE)": (
        "phimoe",
        {
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                **_LONGROPE["rope_parameters"],  # type: ignore[dict-item]
                "short_mscale": 1.2,
                "long_mscale": 1.3,
            },
        },
    ),
    "gemma4_text (keys are values)": (
        "gemma4_text",
        {**SETTINGS["gemma4_text"], "attention_k_eq_v": True},
    ),
    "gemma4_text (per-layer inputs)": ("gemma4_text", {"vocab_size_per_layer_input": 260}),
    "llama (llama3 scaling)": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "olmo3 (YaRN in full layers)": (
        "olmo3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 256,
                },
            }
        },
    ),
}


@dataclass(frozen=True)
class FamilyResult:
    """Result of one family.

    family   model type of its config, and the form if it is not the usual one
    outcome  accepted, refused or not tried
    reason   why it is not accepted
    error    largest difference of a logit in float32, over all comparisons
    layers   how its layers rotate and attend, in a few words
    """

    family: str
    outcome: str
    reason: str = ""
    error: str = ""
    layers: str = ""


class NotTried(Exception):  # a finding, not a fault
    """Reason why a family was not built."""


class _ByteTokenizer:
    """Stands in for a tokenizer: the scan works with token ids."""

    eos_token_id = 256
    backend_tokenizer = None

    def get_vocab(self) -> dict[str, int]:
        """Return no words."""
        return {}


def all_families() -> list[str]:
    """Return the families of the installed transformers and the further forms, by name."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def tiny_config(family: str) -> Any:
    """Return a small config of a family. Raises NotTried if its config cannot be made so."""
    model_type, settings = VARIANTS.get(family, (family, SETTINGS.get(family, {})))
    config_class = CONFIG_MAPPING[model_type]
    try:
        usual = config_class()
        known = {*usual.to_dict(), *config_class.attribute_map}
        given = {name: value for name, value in SMALL.items() if name in known}
        if getattr(usual, "sliding_window", None) is not None:
            given["sliding_window"] = WINDOW
        kinds = sorted(set(getattr(usual, "layer_types", None) or ()), reverse=True)
        if kinds and set(kinds) <= {"full_attention", "sliding_attention"}:
            given["layer_types"] = [
                kinds[layer % len(kinds)] for layer in range(SMALL["num_hidden_layers"])
            ]
        return config_class(**(given | settings))
    except Exception as error:  # configs raise anything
        raise NotTried(f"no small config could be made ({_brief(error)})") from error


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny random model of a family. Raises NotTried if it cannot be built small."""
    config = tiny_config(family)
    model_type, _settings = VARIANTS.get(family, (family, {}))
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], None)
    if model_class is None:
        raise NotTried("transformers does not export its class")
    try:
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    except Exception as error:  # models raise anything for a config that does not fit
        raise NotTried(f"no small model could be built ({_brief(error)})") from error
    if parameters > MOST_PARAMETERS:
        raise NotTried(
            f"its smallest form has more than {MOST_PARAMETERS // 10**6} million parameters"
        )
    torch.manual_seed(0)
    model = model_class(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # the usual initialisation is so small that all tokens look alike
            else:
                # norms and sinks are not all alike
                parameter.add_(0.2 * torch.randn(parameter.shape).to(dtype))
    return model


def tiny_decoder(family: str, *, dtype: torch.dtype = torch.float32) -> Decoder:
    """Return a tiny random decoder of a family. Raises NotTried or UnsupportedModelError."""
    return Decoder(tiny_model(family, dtype=dtype), _ByteTokenizer(), name=family)


def tokens(seed: int, length: int) -> list[int]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(1, 250, (length,), generator=generator).tolist()
    return ids


def captures_of(output: PrefillResult) -> list[ResidentKV]:
    """Return the chunk-caches that a pass captured, at the positions of their capture."""
    return [ResidentKV(capture.start, capture.kv) for capture in output.recorder.captures]


def after_own_prefix(decoder: Decoder, ids: Sequence[int], bounds: Sequence[int]) -> PrefillResult:
    """Compute the last segment of a prompt over chunk-caches that were captured after the same prefix."""
    start = bounds[-2]
    job = PrefillJob(
        ids[:start], Rows.of(bounds[:-1], new=range(start)), captures=range(len(bounds) - 2)
    )
    stored = captures_of(prefill(decoder, job))
    rows = Rows.of(bounds, new=range(start, len(ids)))
    return prefill(
        decoder, PrefillJob(ids, rows, resident=stored, capacity=len(ids) + ANSWER_TOKENS)
    )


def moved_at_ratio_one(
    decoder: Decoder, ids: Sequence[int], bounds: Sequence[int]
) -> PrefillResult:
    """Recompute every token of a chunk that was captured at another position."""
    first, second = bounds[1:3]
    chunk = ids[first:second]
    alone = prefill(
        decoder, PrefillJob(chunk, Rows.of([0, len(chunk)], new=range(len(chunk))), captures=[0])
    )
    moved = [ResidentKV(first, captures_of(alone)[0].kv)]
    rows = Rows.of(
        bounds, new=[*range(first), *range(second, len(ids))], recomputed=range(first, second)
    )
    return prefill(decoder, PrefillJob(ids, rows, resident=moved, capacity=len(ids)))


def answer(decoder: Decoder, output: PrefillResult, position: int) -> list[int]:
    """Return the next tokens, decoded in the prompt's own buffer."""
    found = [int(decoder.next_logits(output.hidden).argmax())]
    while len(found) < ANSWER_TOKENS:
        hidden = extend(decoder, output.buffer, found[-1:], position)
        found.append(int(decoder.next_logits(hidden).argmax()))
        position += 1
    return found


def own_answer(decoder: Decoder, ids: Sequence[int]) -> list[int]:
    """Return the next tokens of transformers' own generate."""
    with decoder.stock() as model, torch.inference_mode():
        whole = model.generate(
            torch.tensor([list(ids)]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=ANSWER_TOKENS,
            min_new_tokens=ANSWER_TOKENS,
            eos_token_id=-1,
        )
    found: list[int] = whole[0, len(ids) :].tolist()
    return found


@torch.inference_mode()
def largest_error(decoder: Decoder) -> float:
    """Return the largest difference of a logit between passes of this package and the model's own forward.

    Raises UnsupportedModelError if the tokens of an answer differ.
    """
    ids = tokens(seed=1, length=100)
    bounds = [0, 20, 62, 100]
    own_logits = decoder.own_logits(ids)[0]
    reused = after_own_prefix(decoder, ids, bounds)
    errors = [_error(decoder, reused, own_logits)]
    errors.append(_error(decoder, moved_at_ratio_one(decoder, ids, bounds), own_logits))
    for length in (WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 2 * WINDOW + 1):
        prompt = tokens(seed=length, length=length)
        output = after_own_prefix(decoder, prompt, [0, 9, length - 4, length])
        errors.append(_error(decoder, output, decoder.own_logits(prompt)[0]))
    found = answer(decoder, reused, len(ids))
    expected = own_answer(decoder, ids)
    if found != expected:
        raise UnsupportedModelError(
            f"chunk-caches: its answer is {found}, but its own generate gives {expected}"
        )
    return max(errors)


def _error(decoder: Decoder, output: PrefillResult, own_logits: Tensor) -> float:
    return float(
        (decoder.next_logits(output.hidden) - own_logits).abs().max().nan_to_num(nan=torch.inf)
    )


def scan(family: str) -> FamilyResult:
    """Build a family, compare it with its own forward, and return the result."""
    try:
        decoder = tiny_decoder(family)
        self_check(decoder)
        error = largest_error(decoder)
        if error > LARGEST_ERROR:
            raise UnsupportedModelError(f"chunk-caches: a logit differs by {error:.1e}")
        layers = describe(decoder)
        if not passes_in_bfloat16(family, decoder):
            layers += "; bfloat16 changes its choice of experts at this size"
    except NotTried as error:
        return FamilyResult(family, "not tried", str(error))
    except UnsupportedModelError as refusal:
        return FamilyResult(family, "refused", reason_of(refusal))
    except Exception as error:  # noqa: BLE001  # the model's own forward may raise anything for a tiny config
        return FamilyResult(
            family, "not tried", f"its own forward fails at this size ({_brief(error)})"
        )
    return FamilyResult(family, "accepted", error=f"{error:.0e}", layers=layers)


def passes_in_bfloat16(family: str, exact: Decoder) -> bool:
    """Return whether a family passes the self-check in bfloat16; False if only rounding is the reason.

    Random routers choose among experts that score alike, so that rounding changes the choice for a token here and
    there. Over several prompts the errors are then those of the model's own forward in bfloat16.

    Raises UnsupportedModelError if they are larger.
    """
    half = tiny_decoder(family, dtype=torch.bfloat16)
    try:
        self_check(half)
    except UnsupportedModelError:
        own_errors: list[float] = []
        errors: list[float] = []
        for seed in range(40):
            ids = tokens(seed, length=60)
            expected = exact.own_logits(ids)[0]
            output = after_own_prefix(half, ids, [0, 20, 40, 60])
            own_errors.append(float((half.own_logits(ids)[0] - expected).norm() / expected.norm()))
            errors.append(
                float((half.next_logits(output.hidden) - expected).norm() / expected.norm())
            )
        if median(errors) > 1.5 * median(own_errors):
            raise
        return False
    return True


def describe(decoder: Decoder) -> str:
    """Return how a decoder's layers rotate and attend, in a few words."""
    survey = decoder.survey
    head_dim = max(key_dim for key_dim, _value_dim in survey.dims)
    words: list[str] = []
    rotations: list[str] = []
    for kind in survey.kinds:
        form = kind.form
        if form.rotary_dim == 0:
            rotation = "none"
        else:
            pairs = "adjoining pairs" if form.interleaved else "half-split pairs"
            part = (
                ""
                if form.rotary_dim == form.head_dim
                else f", {form.rotary_dim} of {form.head_dim} dimensions"
            )
            rotation = pairs + part
        if rotation not in rotations:
            rotations.append(rotation)
    words.append("rotation: " + " and ".join(rotations))
    if len(survey.kinds) > len(rotations):
        words.append(f"{len(survey.kinds)} rotary tables")
    if any(settings.window for settings in survey.settings):
        windows = sum(settings.window is not None for settings in survey.settings)
        words.append(
            "sliding window" if windows == len(survey.settings) else "sliding window in some layers"
        )
    if any(settings.sinks is not None for settings in survey.settings):
        words.append("sinks")
    if any(settings.softcap for settings in survey.settings):
        words.append("soft cap")
    if any(key_dim != head_dim or value_dim != head_dim for key_dim, value_dim in survey.dims):
        words.append("heads of several sizes")
    return "; ".join(words)


def reason_of(refusal: UnsupportedModelError) -> str:
    """Return the reason in a refusal's message, without the model's name and the advice."""
    message = str(refusal)
    _model, separator, reason = message.partition("chunk-caches: ")
    reason = reason if separator else message
    for advice in (". Use a decoder-only model", " Its attention does something"):
        reason = reason.partition(advice)[0]
    return reason.rstrip(".")


def _brief(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 100 else text[:97] + "…"


def write_csv(results: Iterable[FamilyResult], path: Path) -> None:
    """Write results as CSV, in the order of their names."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, [field.name for field in fields(FamilyResult)], lineterminator="\n"
        )
        writer.writeheader()
        for result in sorted(results, key=lambda result: result.family):
            writer.writerow(asdict(result))


def read_csv(path: Path) -> list[FamilyResult]:
    """Read what `write_csv` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        return [FamilyResult(**row) for row in csv.DictReader(file)]


def page_section(results: Sequence[FamilyResult]) -> str:
    """Return the part of docs/models.md that lists the families, as Markdown."""
    accepted = [result for result in results if result.outcome == "accepted"]
    lines = [f"## Accepted ({len(accepted)})", "", "| family | layers |", "| --- | --- |"]
    lines += [f"| {result.family} | {result.layers} |" for result in accepted]
    refused = [result for result in results if result.outcome == "refused"]
    lines += ["", f"## Refused ({len(refused)})", ""]
    lines += grouped_by_reason(refused)
    skipped = [result for result in results if result.outcome == "not tried"]
    lines += ["", f"## Not tried ({len(skipped)})", ""]
    lines += [
        f"{', '.join(result.family for result in skipped)}: no small model could be built in a few lines."
    ]
    return "\n".join(lines) + "\n"


def grouped_by_reason(results: Sequence[FamilyResult]) -> list[str]:
    """Return one list item for each reason, those with most families first."""
    families: dict[str, list[str]] = {}
    for result in results:
        families.setdefault(result.reason, []).append(result.family)
    ordered = sorted(families.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"- **{', '.join(names)}**: {reason}." for reason, names in ordered]


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Families; all if none is named.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    csv_path: Annotated[
        Path | None, typer.Option("--csv", help="Write the results to this file.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Rewrite the lists in this Markdown page.")
    ] = None,
) -> None:
    """Scan the causal-LM families of the installed transformers."""
    transformers.logging.set_verbosity_error()
    results: list[FamilyResult] = []
    for family in names or all_families():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = scan(family)
        results.append(result)
        gc.collect()
        if not as_json:
            print(
                f"{result.family:28} {result.outcome:10} {result.error:6} {result.reason or result.layers}",
                flush=True,
            )
    if csv_path is not None:
        write_csv(results, csv_path)
    if page is not None:
        rewrite_page(page, results)
    if as_json:
        print(json.dumps(as_outcomes(results), indent=1))


def as_outcomes(results: Sequence[FamilyResult]) -> dict[str, Any]:
    """Return the results by outcome: `accepted` with their layers, `refused` and `not_tried` with their reasons."""
    return {
        "transformers": transformers.__version__,
        "accepted": {
            result.family: result.layers for result in results if result.outcome == "accepted"
        },
        "refused": {
            result.family: result.reason for result in results if result.outcome == "refused"
        },
        "not_tried": {
            result.family: result.reason for result in results if result.outcome == "not tried"
        },
    }


_BEGIN = "<!-- families: written by `python -m benchmarks families` -->\n"
_END = "<!-- end of families -->"


def rewrite_page(page: Path, results: Sequence[FamilyResult]) -> None:
    """Replace the lists in a page by those of these results."""
    ordered = sorted(results, key=lambda result: result.family)
    replace_between(page, _BEGIN, _END, page_section(ordered))


def replace_between(page: Path, begin: str, end: str, section: str) -> None:
    """Replace what stands between two marks in a page."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(begin)
    _old, end, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{section}\n{end}{after}", encoding="utf-8")
