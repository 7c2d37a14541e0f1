"""Facts about a model that vLLM runs in other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cachecraft_rag.checks import check_whole
from cachecraft_rag.errors import (
    UnsupportedModelError,
)
from cachecraft_rag.model.checkpoint import (
    config_of,
    context_length_of,
    end_tokens_of,
    layout_of,
    loading,
    own_dtype,
    take_processor_template,
)
from cachecraft_rag.model.fingerprint import checkpoint_fingerprint, snapshot_folder
from cachecraft_rag.server.served_model import ServedModel
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.vllm.options import VLLMOptions
from cachecraft_rag.vllm.refusals import format_refusal, needed_arguments, refusal

# Architectures that share no chunk-caches with transformers: vLLM makes windows of Cohere 2 one token longer, and
# answers of a tiny DeepSeek V3 differ for a reason that is not known.
_OTHER_NUMBERS = {"Cohere2ForCausalLM", "DeepseekV3ForCausalLM"}


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Fingerprint, layout (all heads) and context length of a model, see `model.decoder.Decoder`."""

    fingerprint: str
    layout: KVLayout
    context_length: int


@dataclass(frozen=True)
class VLLMModel(ServedModel):
    """A model in vLLM's processes.

    arguments   see `refusals.needed_arguments` and `missing_arguments`; none for a server that runs already
    """

    arguments: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def load(
        cls, name: str, *, dtype: str = "auto", options: VLLMOptions | None = None
    ) -> VLLMModel:
        """Return facts about a model: read its config and its tokenizer, and digest its weights, which are not kept.

        Config and tokenizer come from the hub if they are not on this machine. Weights are not downloaded, except for
        the first use of "demo", see `demo_model_folder`. The digests are kept in the user's cache folder.

        Args:
            name: Hugging Face name or folder, or "demo" for the embedded model.
            dtype: dtype of keys and values, such as "bfloat16"; it is not checked. "auto" is the checkpoint's own, or
                float32 if its config names none.
            options: options of the vLLM that is about to start. If chunk-caches cannot be reused with them, the model
                is refused before its weights are read. None for a vLLM that runs already: nothing is refused, the
                fingerprint is that of the checkpoint alone, and `arguments` is {}.

        Raises UnsupportedModelError also without weight files on this machine; AttributeError or KeyError if the config
        lacks the number of layers or heads, the width, the longest context or, with LongRoPE, the original length.
        """
        from transformers import AutoTokenizer

        config = config_of(name)
        text = config.get_text_config()
        reason = None if options is None else refusal(config, options)
        if reason is not None:
            raise reason.error(name)
        own = str(own_dtype(config) or "float32").removeprefix("torch.")
        used = dtype if dtype != "auto" else own
        with loading(name) as source:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            folder = snapshot_folder(source, revision=getattr(config, "_commit_hash", None))
            take_processor_template(tokenizer, folder)
            if options is not None and folder is not None:
                reason = format_refusal(config, options, folder)
            if reason is not None:
                raise reason.error(name)
            fingerprint = None if folder is None else checkpoint_fingerprint(folder, dtype=used)
            generation = None if folder is None else _generation_config(folder)
        if folder is None or fingerprint is None:
            raise UnsupportedModelError(
                f"{name} has no weight files on this machine. Load it once with the hub's client, or name a folder."
            )
        quantization = getattr(config, "quantization_config", None) or {}
        own_quantization = (
            quantization.get("quant_method") if isinstance(quantization, dict) else None
        )
        if options is not None and set(config.architectures or ()) & _OTHER_NUMBERS:
            fingerprint = f"{fingerprint}-vllm"
        if options is not None:
            fingerprint = options.fingerprint(fingerprint, own_quantization=own_quantization)
        return cls(
            name,
            folder,
            tokenizer,
            fingerprint,
            layout_of(config, used),
            context_length_of(config),
            end_tokens_of(generation, config, text, tokenizer),
            {} if options is None else needed_arguments(text),
        )

    def require_ranks(self, ranks: int) -> None:
        """Raise UnsupportedModelError if the key/value heads cannot be divided among so many tensor-parallel ranks."""
        heads = self.layout.kv_heads
        check_whole("tensor_parallel_size", ranks, least=1)
        if heads % ranks:
            fine = ", ".join(
                str(divisor) for divisor in range(1, heads + 1) if heads % divisor == 0
            )
            raise UnsupportedModelError(
                f"{self.name} has {heads} key/value heads, which {ranks} ranks cannot divide; possible are {fine}"
            )

    @property
    def identity(self) -> ModelIdentity:
        """A new `ModelIdentity` with this model's fingerprint, layout and context length, for vLLM's processes."""
        return ModelIdentity(self.fingerprint, self.layout, self.context_length)


def _generation_config(folder: Path) -> object:
    """Return a model's generation config, or None if it has none. Raises what transformers raises for a damaged one."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        return None
