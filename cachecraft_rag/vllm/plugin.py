"""Plugin that vLLM loads in each of its processes: it registers names and imports nothing heavy.

To serve another model family, see "Adding a model family" in docs/models.md; usually it is a line in `ARCHITECTURES`.
"""

from __future__ import annotations

import logging
import os
import secrets

from cachecraft_rag.vllm.versions import is_known_version

logger = logging.getLogger("cachecraft_rag.vllm")

# architecture → module of vllm.model_executor.models and class; `transformers` runs the layers of transformers
ARCHITECTURES = {
    "ApertusForCausalLM": "apertus:ApertusForCausalLM",
    "ArceeForCausalLM": "transformers:TransformersForCausalLM",
    "Cohere2ForCausalLM": "commandr:CohereForCausalLM",
    "CohereForCausalLM": "commandr:CohereForCausalLM",
    "CwmForCausalLM": "transformers:TransformersForCausalLM",
    "DeepseekV2ForCausalLM": "deepseek_v2:DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "deepseek_v2:DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM": "ernie45:Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM": "exaone4:Exaone4ForCausalLM",
    "FlexOlmoForCausalLM": "transformers:TransformersMoEForCausalLM",
    "Gemma2ForCausalLM": "gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "gemma3_mm:Gemma3ForConditionalGeneration",
    "GemmaForCausalLM": "gemma:GemmaForCausalLM",
    "Glm4ForCausalLM": "glm4:Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "glm4_moe:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite:Glm4MoeLiteForCausalLM",
    "GlmForCausalLM": "transformers:TransformersForCausalLM",
    "GPTNeoXForCausalLM": "transformers:TransformersForCausalLM",
    "GptOssForCausalLM": "gpt_oss:GptOssForCausalLM",
    "GraniteForCausalLM": "granite:GraniteForCausalLM",
    "GraniteMoeForCausalLM": "granitemoe:GraniteMoeForCausalLM",
    "Jais2ForCausalLM": "transformers:TransformersForCausalLM",
    "LlamaForCausalLM": "llama:LlamaForCausalLM",
    "MellumForCausalLM": "transformers:TransformersMoEForCausalLM",
    "MiniCPM3ForCausalLM": "minicpm3:MiniCPM3ForCausalLM",
    "Ministral3ForCausalLM": "mistral:MistralForCausalLM",
    "Mistral3ForConditionalGeneration": "mistral3:Mistral3ForConditionalGeneration",
    "MistralForCausalLM": "mistral:MistralForCausalLM",
    "MixtralForCausalLM": "mixtral:MixtralForCausalLM",
    "NemotronForCausalLM": "nemotron:NemotronForCausalLM",
    "Olmo2ForCausalLM": "transformers:TransformersForCausalLM",
    "Olmo3ForCausalLM": "transformers:TransformersForCausalLM",
    "OlmoeForCausalLM": "olmoe:OlmoeForCausalLM",
    "OlmoForCausalLM": "transformers:TransformersForCausalLM",
    "Phi3ForCausalLM": "phi3:Phi3ForCausalLM",
    "PhiForCausalLM": "transformers:TransformersForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl:Qwen2_5_VLForConditionalGeneration",
    "Qwen2ForCausalLM": "qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen2VLForConditionalGeneration": "qwen2_vl:Qwen2VLForConditionalGeneration",
    "Qwen3ForCausalLM": "qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3VLForConditionalGeneration": "qwen3_vl:Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe:Qwen3VLMoeForConditionalGeneration",
    "SeedOssForCausalLM": "transformers:TransformersForCausalLM",
    "SmolLM3ForCausalLM": "transformers:TransformersForCausalLM",
    "StableLmForCausalLM": "stablelm:StablelmForCausalLM",
    "Starcoder2ForCausalLM": "transformers:TransformersForCausalLM",
    "VaultGemmaForCausalLM": "transformers:TransformersForCausalLM",
}
CONNECTOR = "CacheCraftConnector"
PLUGIN = "cachecraft"  # name of the entry point in pyproject.toml
ENDPOINT = "cachecraft_http"  # likewise, of the endpoint plugin
# Variable with the key that signs requests, if `vllm serve` was started: on a command line others would see it.
SEAL_KEY = "CACHECRAFT_SEAL_KEY"


def register() -> None:
    """Register the models of `ARCHITECTURES` and the connector with vLLM; may be called any number of times.

    The environment variable CACHECRAFT_SEAL_KEY gets a random key, unless it is set.

    The models take the place of vLLM's classes of the same architectures. Plain `vllm serve` loads this entry point of
    `vllm.general_plugins` too, and an exception would end that server: failures are only logged, and so is an unknown
    version of vLLM, for which nothing is done.
    """
    import vllm

    if not is_known_version(vllm.__version__):
        logger.info(
            "vLLM %s is unknown to this package, so nothing is registered", vllm.__version__
        )
        return
    # vLLM's other processes inherit it from the first one
    os.environ.setdefault(SEAL_KEY, secrets.token_hex(16))
    try:
        _register()
    # whatever vLLM's modules raise: plain `vllm serve` must go on
    except Exception:
        logger.exception(
            "Registering with vLLM %s failed: chunk-caches cannot be used", vllm.__version__
        )


def _register() -> None:
    from vllm import ModelRegistry
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"cachecraft_rag.vllm.worker.models:{name}")
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            CONNECTOR, "cachecraft_rag.vllm.worker.connector", CONNECTOR
        )
