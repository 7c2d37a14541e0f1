"""The attributes of vLLM's objects that this folder reads. vLLM itself is untyped here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from cachecraft_rag.vllm.options import VLLMConfig


class RequestSampling(Protocol):
    """`vllm.SamplingParams` of a request."""

    prompt_logprobs: int | None


class PrefillStats(Protocol):
    """`vllm.v1.metrics.stats.PrefillStats`, from where the tokens of a prompt are."""

    num_local_cached_tokens: int

    def set(
        self, num_prompt_tokens: int, num_local_cached_tokens: int, num_external_cached_tokens: int
    ) -> None:
        """Replace all numbers."""


class HashedRequest(Protocol):
    """`vllm.v1.request.Request`, as far as vLLM's prefix cache reads it."""

    num_prompt_tokens: int
    cache_salt: str | None
    block_hashes: list[bytes]  # of whole blocks, each computed from the one before it

    def update_block_hashes(self) -> None:
        """Append the hashes of whole blocks that have none."""


class LoRARequest(Protocol):
    """`vllm.lora.request.LoRARequest`, the LoRA adapter of a request."""

    lora_int_id: int
    lora_path: str


class EngineRequest(HashedRequest, Protocol):
    """`vllm.v1.request.Request`, a request in vLLM's scheduler."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    kv_transfer_params: Mapping[str, object] | None
    sampling_params: RequestSampling | None
    prompt_embeds: object
    mm_features: Sequence[object]
    lora_request: LoRARequest | None
    prefill_stats: PrefillStats | None
    skip_reading_prefix_cache: bool | None


class RequestBlocks(Protocol):
    """`vllm.v1.core.kv_cache_manager.KVCacheBlocks`, the blocks of a request."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the block ids of each group of layers, in the order of the prompt's tokens."""


class KVCacheSpec(Protocol):
    """`vllm.v1.kv_cache_interface.KVCacheSpec`, the kind of KV cache of a group of layers."""

    block_size: int


class KVCacheGroup(Protocol):
    """`vllm.v1.kv_cache_interface.KVCacheGroupSpec`, layers with the same kind of KV cache."""

    kv_cache_spec: KVCacheSpec


class KVCacheConfig(Protocol):
    """`vllm.v1.kv_cache_interface.KVCacheConfig`, the KV caches of a model."""

    kv_cache_groups: Sequence[KVCacheGroup]


class Attention(Protocol):
    """`vllm.attention.layer.Attention`, the attention of a layer."""

    layer_name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    impl: Any
    kv_cache: Tensor
    _q_scale: Tensor  # of queries in FP8, one number
    forward: Callable[..., Tensor]


class SelfAttention(Protocol):
    """The attention module of a decoder layer. If the model has rotary positions, it also has `rotary_emb`."""

    attn: Attention


class DecoderLayer(Protocol):
    """A decoder layer written for vLLM.

    Its arguments are positions and hidden states; in most models also the residual, which it then returns too.
    """

    forward: Callable[..., object]

    def __call__(self, *arguments: object, **named: object) -> Any:
        """Return the layer's hidden states, and the residual if it was given one."""


class DecoderLayers(Protocol):
    """The part of a causal LM that holds its layers."""

    layers: Sequence[DecoderLayer]


class LoRAMapping(Protocol):
    """`vllm.lora.layers.LoRAMapping`, the adapter of each row of a step; 0: no adapter."""

    index_mapping: Sequence[int]


class LoRAManager(Protocol):
    """`vllm.lora.model_manager.LoRAModelManager`, the `lora_manager` of a model whose layers take adapters."""

    _last_mapping: LoRAMapping | None
    lora_index_to_id: Sequence[int | None]  # adapters by their place on the device

    def get_adapter(self, adapter_id: int) -> object | None:
        """Return the weights of an adapter; None if it is not loaded."""

    def set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        """Set the adapters of the rows of the next forward."""


class TextModel(Protocol):
    """A causal LM of vLLM's with the same attributes as its Llama, or the one inside a multimodal model.

    `model` is a `PreTrainedModel` where vLLM runs the layers of transformers.
    """

    model: DecoderLayers
    config: PretrainedConfig

    def parameters(self) -> Iterator[Tensor]:
        """Yield the weights."""

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings `[rows, hidden]` of token ids, int32 or int64 `[rows]`."""


class VLLMModule(Protocol):
    """A model that vLLM runs: a `TextModel`, or a multimodal model with one inside, see `models.text_part`."""

    vllm_config: VLLMConfig  # set by `models`
    reserved_memory: list[Tensor]  # set by `models`

    def parameters(self) -> Iterator[Tensor]:
        """Yield the weights."""

    def __call__(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None,
        inputs_embeds: Tensor | None = None,
    ) -> object:
        """Return the hidden states of the rows `[rows]`, each token id or embedding at its position."""


class SchedulerOutput(Protocol):
    """`vllm.v1.core.sched.output.SchedulerOutput`, the work of a step."""

    total_num_scheduled_tokens: int
    num_scheduled_tokens: Mapping[str, int]  # by id of the request
    finished_req_ids: set[str]
