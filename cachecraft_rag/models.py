"""A decoder-only Hugging Face model taken apart: its stock layers, run one by one with raw keys and our own attention.

Each stock decoder layer is called with the identity as rotary embedding (cos = 1, sin = 0), so that queries and keys
reach the attention function *raw*; the attention function is ours and finds the running pass among the layer's
keyword arguments. Nothing of the model is patched, no inverse rotation is needed and nothing is lost to rounding.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import torch
import xxhash
from torch import Tensor

from cachecraft_rag.embedded import demo_model_folder
from cachecraft_rag.errors import ModelNotFoundError, UnsupportedModelError
from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.types import KVLayout, digest

logger = logging.getLogger("cachecraft_rag.models")

ATTENTION_NAME = "cachecraft"
LAYOUT_VERSION = "1"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LayerPass(Protocol):
    """One pass of some rows through the layers; called back by each layer's attention."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attend: raw `q` `[rows, heads, head_dim]`, `k` and `v` `[rows, kv_heads, head_dim]`; returns like `q`."""
        ...


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layer_pass: LayerPass,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_unused: object,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers; tensors arrive as `[1, heads, rows, head_dim]`."""
    out = layer_pass.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out[None], None


class Decoder:
    """A supported decoder-only language model with its tokenizer.

    Attributes:
        name: what the user asked for.
        tokenizer: the model's own.
        layout: shape and dtype of its chunk-caches.
        fingerprint: hash over weights, config, tokenizer, dtype and layout version; equal in every process.
        context_length: most tokens of prompt and answer together.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str) -> None:
        _refuse_unsupported(model, name)
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, _attention)
        self.name = name
        self.model = model.eval()
        self.model.set_attn_implementation(ATTENTION_NAME)
        self.tokenizer = tokenizer
        config = model.config
        self._base = model.model
        self._layers = self._base.layers
        self._stock_attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        heads = config.num_attention_heads
        self.layout = KVLayout(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=cast(Any, str(self.dtype).removeprefix("torch.")),
        )
        self.context_length: int = config.max_position_embeddings
        self.end_tokens = _end_tokens(model, tokenizer)
        self.fingerprint = _fingerprint(model, tokenizer)

    @classmethod
    def load(cls, name: str, *, dtype: str = "auto", device: str = "auto") -> Decoder:
        """Load a model by Hugging Face name, folder, or `"demo"` for the embedded SmolLM2-135M-Instruct.

        Args:
            dtype: `float32`, `bfloat16`, `float16`, or `auto`: the checkpoint's own on a GPU, bfloat16 on a CPU.
            device: `cpu`, `cuda`, `cuda:1` …, or `auto`: CUDA where there is one.

        Raises:
            ModelNotFoundError: nothing of that name can be loaded.
            UnsupportedModelError: it has no raw keys to store.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = str(demo_model_folder()) if name == "demo" else name
        place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        kind: Any = _DTYPES.get(dtype, "auto")
        if kind == "auto" and place == "cpu":
            kind = torch.bfloat16
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=kind)
        except (OSError, ValueError) as error:
            raise ModelNotFoundError(
                f"cannot load the model {name!r}: {error}\n"
                'Name a Hugging Face model, a folder that holds one, or "demo" for the embedded model.'
            ) from error
        return cls(model.to(place), tokenizer, name=name)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids `[rows]` to the first layer's input `[1, rows, hidden]`."""
        hidden: Tensor = self._base.embed_tokens(ids[None])
        return hidden

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the model's own rotary module at these positions, each `[tokens, rotary_dim]`."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self._base.rotary_emb(probe, positions[None])
        return cos[0], sin[0]

    def layer(self, index: int, hidden: Tensor, *, positions: Tensor, layer_pass: LayerPass) -> Tensor:
        """Run one stock layer over `[1, rows, hidden]`; its attention calls `layer_pass.attend`."""
        width = self.rotary_dim
        one = torch.ones(1, 1, width, dtype=self.dtype, device=self.device)
        identity = (one, torch.zeros_like(one))
        out = self._layers[index](
            hidden,
            attention_mask=None,
            position_ids=positions[None],
            position_embeddings=identity,
            layer_pass=layer_pass,
        )
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head the model rotates."""
        return int(self._base.rotary_emb.inv_freq.shape[-1]) * 2

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[rows, vocabulary]` (float32) of last-layer hidden states `[1, rows, hidden]`."""
        scores: Tensor = self.model.lm_head(self._base.norm(hidden))[0].float()
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return cap * torch.tanh(scores / cap) if cap else scores

    def own_logits(self, ids: Sequence[int], *, keep: int = 1) -> Tensor:
        """The unmodified model's own forward: logits of the last `keep` positions `[keep, vocabulary]`; the reference
        of every gate.

        It runs transformers' stock attention (sdpa; eager where scores are soft-capped, which sdpa cannot do).
        """
        with self.stock(), torch.inference_mode():
            batch = torch.tensor([list(ids)], device=self.device)
            logits: Tensor = self.model(input_ids=batch, logits_to_keep=keep, use_cache=True).logits[0]
            return logits.float()

    @contextlib.contextmanager
    def stock(self) -> Iterator[Any]:
        """The model with transformers' own attention while the block lasts; no other pass may run meanwhile."""
        self.model.set_attn_implementation(self._stock_attention)
        try:
            yield self.model
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: the generation config's, the config's and the tokenizer's."""
    found: set[int] = set()
    for holder in (model.generation_config, model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def _fingerprint(model: Any, tokenizer: Any) -> str:
    """Hash of everything that shapes a chunk-cache's numbers, equal across processes and machines."""
    weights = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        weights.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    volatile = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
    config = {key: value for key, value in model.config.to_dict().items() if key not in volatile}
    vocabulary = getattr(tokenizer, "backend_tokenizer", None)
    words = vocabulary.to_str() if vocabulary is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    dtype = str(next(model.parameters()).dtype)
    return digest(
        "model", LAYOUT_VERSION, weights.hexdigest(), json.dumps(config, sort_keys=True, default=str), words, dtype
    )


def _refuse_unsupported(model: Any, name: str) -> None:
    """Raise UnsupportedModelError with the reason unless the model is of the Llama build."""
    reason = _unsupported_reason(model)
    if reason is not None:
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise UnsupportedModelError(
            f"{name} ({kind}) cannot be served from chunk-caches: {reason}. "
            "Use a decoder-only model with rotary embeddings: Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma-2 or one of "
            "the same build."
        )


def _unsupported_reason(model: Any) -> str | None:
    config = model.config
    layers = getattr(getattr(model, "model", None), "layers", None)
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) stores a compressed latent, not keys"
    if getattr(config, "alibi", False):
        return "ALiBi puts positions into the scores, not into keys that could be moved"
    kinds = set(getattr(config, "layer_types", None) or ())
    if any("mamba" in kind or "linear" in kind or "recurrent" in kind or "conv" in kind for kind in kinds):
        return "its state-space or linear-attention layers keep one running state, not a key per token"
    if layers is None or not hasattr(model, "lm_head") or not hasattr(model.model, "norm"):
        if hasattr(config, "state_size") or hasattr(config, "ssm_cfg"):
            return "state-space layers keep one running state, not a key per token"
        return "its layers are not laid out like Llama's; learned positions, for one, cannot be moved"
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is None or not hasattr(rotary, "inv_freq"):
        return "it has no single rotary embedding whose positions could be re-applied"
    attention = getattr(layers[0], "self_attn", None)
    if attention is None or "position_embeddings" not in inspect.signature(attention.forward).parameters:
        return "its attention does not take rotary embeddings from outside"
    return _rotary_reason(model, attention)


def _rotary_reason(model: Any, attention: Any) -> str | None:
    """Whether the model's own rotation is the half-split one that `kernels.rope` does, tried on numbers."""
    own = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if own is None:
        return "its module has no apply_rotary_pos_emb"
    width = int(model.model.rotary_emb.inv_freq.shape[-1]) * 2
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 3, attention.head_dim, generator=generator)  # [1, heads, tokens, head_dim]
    angle = torch.randn(3, width // 2, generator=generator).repeat(1, 2)
    try:
        expected = own(x, x, angle.cos()[None], angle.sin()[None])[1]
    except (TypeError, RuntimeError) as error:
        return f"its rotary embedding has another form ({error})"
    if not torch.allclose(
        expected[0].transpose(0, 1), rotate(x[0].transpose(0, 1), angle.cos(), angle.sin()), atol=1e-5
    ):
        return "its rotary embedding pairs other dimensions than Llama's"
    return None
