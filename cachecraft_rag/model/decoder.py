"""A decoder-only Hugging Face model taken apart: its stock layers, run one by one with raw keys and our own attention.

Each stock decoder layer is called with the identity as rotary embedding (cos = 1, sin = 0), so queries and keys reach
the attention function *raw*. The attention function is ours and passes them to the running pass. Nothing of the model
is patched, and raw keys are stored without the rounding error of an inverse rotation.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from cachecraft_rag.compute.stack import (
    Alone,
    AttentionSettings,
    LayerPass,
    Ranks,
    WholeModel,
    keys_per_row_of,
)
from cachecraft_rag.errors import ConfigError, UnsupportedModelError
from cachecraft_rag.kernels.attention_paths import UNMEASURED
from cachecraft_rag.kernels.memory import Recycler
from cachecraft_rag.model.attention_choice import measured_paths
from cachecraft_rag.model.checkpoint import (
    config_of,
    context_length_of,
    end_tokens_of,
    loading,
    own_dtype,
    take_processor_template,
)
from cachecraft_rag.model.chunk_bound import ModelTokens
from cachecraft_rag.model.fingerprint import (
    checkpoint_fingerprint,
    model_fingerprint,
    snapshot_folder,
)
from cachecraft_rag.model.fused_layers import CompiledLayer, GPULayer, fused_layers, product
from cachecraft_rag.model.hub_check import without_bars
from cachecraft_rag.model.layer_survey import (
    ModelSurvey,
    SeenAttention,
    SurveyError,
    in_order,
    survey_model,
)
from cachecraft_rag.model.text_part import is_multimodal, load_text_part, text_part_refusal
from cachecraft_rag.types.kv_layout import DTypeName, KVLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

ATTENTION_NAME = "cachecraft"
_running: ContextVar[Callable[[SeenAttention], Tensor] | None] = ContextVar(
    "cachecraft_attention", default=None
)
_POSITION_ARGUMENTS = ("position_ids", "cache_position")
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
# Bloom, MPT: always; Falcon has a setting for it
_BUILDS_ALIBI = re.compile(r"build_\w*alibi_tensor")
_ENCODER_DECODER = (
    "it is an encoder-decoder, and a question's chunks would pass through the encoder together"
)
_POSITION_TABLES = (
    "wpe",
    "embed_positions",
    "position_embeddings",
    "positions_embed",
    "position_embedding",
)
_FAST_BFLOAT16 = ("amx_bf16", "avx512_bf16")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention function registered with transformers; tensors arrive as `[1, heads, rows, head_dim]`."""
    attend = _running.get()
    if attend is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} ran outside a pass of this package. If you called the model yourself, do it "
            "inside Decoder.stock()."
        )
    for name, given in others.items():
        if isinstance(given, Tensor) and name not in _POSITION_ARGUMENTS:
            raise UnsupportedModelError(
                f"{type(module).__name__} gives {name} to its attention, which is not known"
            )
    settings = AttentionSettings(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.detach().float().contiguous(),
    )
    return attend(SeenAttention(module, query, key, value, settings)), None


@contextlib.contextmanager
def _attention_calls(attend: Callable[[SeenAttention], Tensor]) -> Iterator[None]:
    """Send the attention of every layer that this thread runs to `attend`, which returns `[1, rows, heads, dim]`."""
    before = _running.set(attend)
    try:
        yield
    finally:
        _running.reset(before)


class Decoder:
    """A supported decoder-only language model with its tokenizer.

    Attributes:
        name: the argument of `load`.
        tokenizer: the model's own.
        layout: shape and dtype of its chunk-caches.
        fingerprint: identity of checkpoint, tokenizer and dtype, see `fingerprint`; equal in every process.
        context_length: most tokens of prompt and answer together.
        end_tokens: ids that end an answer, see `end_tokens_of`.
        device, dtype: of the model's weights; keys and values have the same.
        attention_paths: the fastest ways to attend on this CPU, measured by `load`.
        fused_layers: layers that run fewer operations than the model's own; None = the model's own run.
        survey: how the model calls its layers, and how each of them rotates and attends.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        fingerprint: str | None = None,
    ) -> None:
        """Take a loaded model apart.

        The model is changed: from now on its own forward works inside `stock` only, and it is in eval mode.

        Args:
            model: a causal LM of transformers.
            tokenizer: the model's own.
            name: the name that messages call it by.
            fingerprint: fingerprint of its checkpoint; None = made from the model's tensors.
        """
        _refuse_unsupported(model, name)
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, _attention)
        self.name = name
        self.model = model.eval()
        self.model.set_attn_implementation(ATTENTION_NAME)
        self.tokenizer = tokenizer
        self.ranks: Ranks = Alone()
        self.attention_paths = UNMEASURED
        self.memory = Recycler()
        self.whole_model: WholeModel | None = None
        config = model.config
        parts = _parts_of(model)
        assert parts is not None, "refused above"
        self._parts = parts
        self._norms_embeddings = False
        self._layers = parts.layers
        capped = getattr(config, "attn_logit_softcapping", None)
        self._stock_attention = (
            "sdpa" if getattr(model, "_supports_sdpa", False) and not capped else "eager"
        )
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = parameter.dtype
        self.survey = self._survey_layers()
        self.keys_per_row = keys_per_row_of(config)
        self._orders = [self.survey.kinds[kind].form.order for kind in self.survey.kind_of]
        self.layout = KVLayout(
            layers=len(self._layers),
            kv_heads=max(self.survey.heads),
            head_dim=max(max(dims) for dims in self.survey.dims),
            dtype=cast(DTypeName, str(self.dtype).removeprefix("torch.")),
        )
        self.fused_layers: list[CompiledLayer | GPULayer] | None = None
        has_own_order = any(order is not None for order in self._orders)
        if self.device.type in ("cpu", "cuda") and not has_own_order:
            rotary_dims = [self.survey.kinds[kind].form.rotary_dim for kind in self.survey.kind_of]
            self.fused_layers = fused_layers(
                self._layers,
                config.hidden_size,
                self.dtype,
                self.device,
                rotary_dims=rotary_dims,
                run=self._stock_layer,
            )
        self.context_length = context_length_of(config)
        self.end_tokens = end_tokens_of(model.generation_config, model.config, tokenizer)
        self.fingerprint = fingerprint or model_fingerprint(model, tokenizer)

    @classmethod
    def load(cls, name: str, *, dtype: str = "auto", device: str = "auto") -> Decoder:
        """Load a model by Hugging Face name, folder, or `"demo"` for the embedded SmolLM2-135M-Instruct.

        Downloads what this disk lacks. Reads all weights once more for the fingerprint, and on a CPU measures the
        fastest ways to attend, unless the user's cache folder has both. `load_checked` also checks its results.

        Args:
            name: Hugging Face name or folder, or "demo".
            dtype: `float32`, `bfloat16`, `float16`, or `auto`, see `auto_dtype`.
            device: `cpu`, `cuda`, `cuda:1` …, or `auto`: CUDA where there is one, but the CPU for "demo", because a GPU
                computes the short prompts of a model this small sooner than it could reuse any of them.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = device_of(name, device)
        if dtype not in ("auto", *_DTYPES):
            raise ConfigError(f"unknown dtype {dtype!r}; choose one of auto, {', '.join(_DTYPES)}")
        with loading(name) as source:
            config = config_of(name)
            kind: torch.dtype | str = _DTYPES.get(
                auto_dtype(config, place) if dtype == "auto" else dtype, "auto"
            )
            # the next lines would not even know its class
            if getattr(config, "is_encoder_decoder", False):
                raise _refusal(name, config.model_type, _ENCODER_DECODER)
            reason = text_part_refusal(config) if is_multimodal(config) else ""
            if reason:
                raise _refusal(name, config.model_type, reason)
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            with _loading_bars(source):
                model: Any
                if is_multimodal(config):
                    model = load_text_part(source, config, kind)
                else:
                    model = AutoModelForCausalLM.from_pretrained(
                        source, dtype=kind, trust_remote_code=False
                    )
            _refuse_unsupported(model, name)  # before all weights are read once more
            folder = snapshot_folder(source, revision=getattr(config, "_commit_hash", None))
            take_processor_template(tokenizer, folder)
            used = str(next(model.parameters()).dtype).removeprefix("torch.")
            fingerprint = None if folder is None else checkpoint_fingerprint(folder, dtype=used)
        decoder = cls(model.to(place), tokenizer, name=name, fingerprint=fingerprint)
        if place.type == "cpu":
            decoder.attention_paths = measured_paths(
                decoder.dtype,
                heads=model.config.num_attention_heads,
                kv_heads=decoder.layout.kv_heads,
                head_dim=decoder.layout.head_dim,
            )
        return decoder

    @cached_property
    def chunk_bound(self) -> ModelTokens:
        """Token count of this model and its limit for a document's chunks in tokens, see `ModelTokens.of`."""
        return ModelTokens.of(self.tokenizer, context_length=self.context_length)

    @torch.no_grad()
    def _survey_layers(self) -> ModelSurvey:
        """Return how the model calls its layers."""

        def forward(ids: Tensor) -> object:
            with self.stock() as model:
                return model(input_ids=ids, use_cache=False)

        try:
            survey = survey_model(self.model, self._layers, forward=forward, watch=_attention_calls)
            for self._norms_embeddings in (False, True):
                expected = self.embed(survey.ids[0])
                if torch.allclose(survey.embedded, expected, rtol=1e-2, atol=1e-5):
                    return survey
            raise SurveyError("something other than its token embeddings enters its first layer")
        except SurveyError as error:
            raise self._refusal(str(error)) from error

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return _refusal(self.name, self.model.config.model_type, reason)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the first layer's input `[1, rows, hidden]` of token ids int64 `[rows]` on the model's device."""
        hidden: Tensor = self._parts.embed(ids[None])
        if self._norms_embeddings:  # NanoChat
            hidden = self._parts.norm(hidden)
        return hidden * getattr(self.model.config, "embedding_multiplier", 1.0)  # Granite

    @property
    def rotary_kinds(self) -> Sequence[int]:
        """For each layer, in order, the number of its rotary table: the `kind` of `rope`."""
        return self.survey.kind_of

    def rope(self, positions: Tensor, kind: int = 0) -> tuple[Tensor, Tensor]:
        """Return cos and sin of one of `rotary_kinds` at positions int64 `[tokens]`, each `[tokens, rotary_dim]`."""
        return self.survey.kinds[kind].tables(positions, self.dtype)

    def layer(
        self, index: int, hidden: Tensor, *, positions: Tensor, layer_pass: LayerPass
    ) -> Tensor:
        """Run one layer over hidden states `[1, rows, hidden]` at positions int64 `[rows]`; return the new ones.

        A fused layer runs if the model has some and can run this one; otherwise the model's own. See `Stack.layer`.
        """
        if self.fused_layers is not None:
            fused = self.fused_layers[index](hidden, layer_pass)
            if fused is not None:
                return fused
        return self._stock_layer(index, hidden, positions, layer_pass)

    def _stock_layer(
        self, index: int, hidden: Tensor, positions: Tensor, layer_pass: LayerPass
    ) -> Tensor:
        """Run the model's own layer over `[1, rows, hidden]` with raw keys; its attention calls `layer_pass`."""
        order = self._orders[index]
        kv_heads = self.layout.kv_heads
        head_dim = self.layout.head_dim
        attended = False

        def attend(seen: SeenAttention) -> Tensor:
            nonlocal attended
            if attended:
                raise self._refusal(
                    "its layers attend more than once, and a layer has room for one key per token"
                )
            attended = True
            q = in_order(seen.query[0].transpose(0, 1), order)
            k = in_order(seen.key[0].transpose(0, 1), order)
            v = seen.value[0].transpose(0, 1)
            value_dim = v.shape[2]
            if k.shape[1] < kv_heads:  # other layers have more key/value heads
                k = k.repeat_interleave(kv_heads // k.shape[1], dim=1)
                v = v.repeat_interleave(kv_heads // v.shape[1], dim=1)
            q = _widened(q, head_dim)
            k = _widened(k, head_dim)
            v = _widened(v, head_dim)
            out = layer_pass.attend(index, q, k, v, seen.settings)
            return out[None, ..., :value_dim]

        with _attention_calls(attend):
            return self.survey.calls[index].run(hidden, positions)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[rows, vocabulary]` (float32) of last-layer hidden states `[1, rows, hidden]`."""
        scores: Tensor = self._to_logits(self._parts.norm(hidden))[0].float()
        scores = scores / getattr(self.model.config, "logits_scaling", 1.0)  # Granite
        scores = scores * (getattr(self.model.config, "logit_scale", None) or 1.0)  # Cohere
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return cap * torch.tanh(scores / cap) if cap else scores

    def _to_logits(self, hidden: Tensor) -> Tensor:
        head = self._parts.head
        return (
            product(head, hidden) if self.fused_layers is not None else cast(Tensor, head(hidden))
        )

    def next_logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[vocabulary]` (float32) of the last row of hidden states `[1, rows, hidden]`; see `logits`."""
        return self.logits(hidden[:, -1:])[0]

    def own_logits(self, ids: Sequence[int], *, keep: int = 1) -> Tensor:
        """Return the unmodified model's own logits at the last `keep` (1 or more) of these ids, `[keep, vocabulary]`.

        They are float32, and every gate compares with them. It runs transformers' sdpa, or eager for what sdpa cannot
        do. No pass may run meanwhile.
        """
        with self.stock(), torch.inference_mode():
            batch = torch.tensor([list(ids)], device=self.device)
            logits: Tensor = self.model(
                input_ids=batch, logits_to_keep=keep, use_cache=True
            ).logits[0]
            return logits.float()

    @contextlib.contextmanager
    def stock(self) -> Iterator[Any]:
        """Provide the model with transformers' own attention inside the block, in which no pass may run."""
        self.model.set_attn_implementation(self._stock_attention)
        try:
            yield self.model
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Record the input of each layer and the output of its attention while the block runs.

        Yields a list that fills with pairs (input, attention output), each `[1, rows, hidden]`, in the order in which
        layers run; no copies. Fused layers do not run meanwhile, because they leave layers with hooks to the model.
        """
        seen: list[tuple[Tensor, Tensor]] = []
        inputs: list[Tensor] = []

        def before(
            _layer: torch.nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]
        ) -> None:
            inputs.append(args[0] if args else named["hidden_states"])

        def after(
            _attention: torch.nn.Module, _args: object, out: Tensor | tuple[Tensor, ...]
        ) -> None:
            seen.append((inputs[-1], out[0] if isinstance(out, tuple) else out))

        with contextlib.ExitStack() as hooks:
            for call in self.survey.calls:
                hooks.callback(
                    call.layer.register_forward_pre_hook(before, with_kwargs=True).remove
                )
                assert call.attention is not None, "found by the survey"
                hooks.callback(call.attention.register_forward_hook(after).remove)
            yield seen


def _widened(heads: Tensor, head_dim: int) -> Tensor:
    """Return heads `[rows, heads, dim]` with zeros up to `head_dim`."""
    missing = head_dim - heads.shape[2]
    return heads if missing == 0 else torch.nn.functional.pad(heads, (0, missing))


def _loading_bars(source: str) -> contextlib.AbstractContextManager[None]:
    """Return a context without transformers' bars if the weights are on this disk; a download keeps its bars."""
    from huggingface_hub import try_to_load_from_cache

    files = ("model.safetensors", "model.safetensors.index.json")
    is_local = os.path.isdir(source) or any(
        isinstance(try_to_load_from_cache(source, file), str) for file in files
    )
    return without_bars() if is_local else contextlib.nullcontext()


def device_of(model: str, name: str = "auto") -> torch.device:
    """Return the device for a model; `name` is the `device` of `Decoder.load`. ConfigError if it is not available."""
    automatic = "cuda" if torch.cuda.is_available() and model != "demo" else "cpu"
    try:
        place = torch.device(automatic if name == "auto" else name)
        torch.empty(1, device=place)
    # the first from a torch that was built without CUDA
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"cannot use the device {name!r} ({reason}); choose cpu, cuda, cuda:1 … or auto"
        ) from error
    return place


def auto_dtype(config: PretrainedConfig, place: torch.device) -> str:
    """Return the dtype of a checkpoint, else "float32"; "bfloat16" for "float32" on a CPU that computes it faster."""
    own = str(own_dtype(config) or "float32").removeprefix("torch.")
    return "bfloat16" if own == "float32" and place.type == "cpu" and computes_bfloat16() else own


def computes_bfloat16() -> bool:
    """Return True if this CPU computes bfloat16 faster than float32 (AMX or AVX-512 BF16)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in _FAST_BFLOAT16)


@dataclass(frozen=True)
class _Parts:
    """Parts of a causal LM between which its layers run.

    embed   token ids to hidden states
    layers  the decoder layers
    norm    applied to the last layer's output
    head    hidden states to logits
    """

    embed: torch.nn.Module
    layers: torch.nn.ModuleList
    norm: torch.nn.Module
    head: torch.nn.Module


def _parts_of(model: Any) -> _Parts | None:
    """Return the parts of a causal LM; None if they are not where most models have them."""
    base = model.base_model
    norm = next((getattr(base, name) for name in _NORMS if hasattr(base, name)), None)
    layers = getattr(base, "layers", None)
    embed = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if norm is None or not isinstance(layers, torch.nn.ModuleList) or embed is None or head is None:
        return None
    return _Parts(embed, layers, norm, head)


def _refuse_unsupported(model: PreTrainedModel, name: str) -> None:
    """Raise UnsupportedModelError with the reason if the model cannot be taken apart."""
    reason = _unsupported_reason(model)
    if reason is not None:
        raise _refusal(name, getattr(model.config, "model_type", type(model).__name__), reason)


def _refusal(name: str, kind: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} ({kind}) cannot be served from chunk-caches: {reason}. "
        "Use a decoder-only model with rotary embeddings, such as Llama, Mistral, Qwen, Gemma, Phi or gpt-oss; "
        "docs/models.md lists the families."
    )


def _unsupported_reason(model: PreTrainedModel) -> str | None:
    parameter = next(model.parameters())
    known = _position_reason(model)
    if known is not None:
        return known
    if _parts_of(model) is None:
        return "its parts are not laid out like Llama's (model.layers, model.norm, lm_head)"
    if str(parameter.dtype).removeprefix("torch.") not in _DTYPES:
        return f"its weights are {parameter.dtype}, and chunk-caches hold {', '.join(_DTYPES)}"
    if getattr(model, "_hf_peft_config_loaded", False):
        return "it carries an adapter that may be switched while it runs; merge the adapter into the weights first"
    return None


def _position_reason(model: PreTrainedModel) -> str | None:
    """Return the reason if models of this kind have no keys that could be moved; else None."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return _ENCODER_DECODER
    if getattr(config, "index_topk", None) or any(
        "indexer" in name for name, _ in model.named_modules()
    ):
        return "an indexer chooses the keys that each token attends to, and it would have to be moved with them"
    if getattr(config, "alibi", False) or any(map(_BUILDS_ALIBI.fullmatch, dir(model.base_model))):
        return "ALiBi puts positions into the scores, not into keys that could be moved"
    kinds = set(getattr(config, "layer_types", None) or ())
    state = ("mamba", "linear", "recurrent", "conv")
    if any(word in kind for kind in kinds for word in state) or config.model_type in (
        "rwkv",
        "xlstm",
    ):
        return "its state-space, recurrent or linear-attention layers keep one running state, not a key per token"
    if kinds - {"full_attention", "sliding_attention"}:
        return f"its layers are of an unknown kind ({', '.join(sorted(kinds))})"
    if any(name.rpartition(".")[2] in _POSITION_TABLES for name, _ in model.named_modules()):
        return "learned or absolute positions are added to the tokens, so its keys cannot be moved"
    return None
