"""Plugin that vLLM loads in each of its processes: it registers names and imports nothing heavy."""

from __future__ import annotations

ARCHITECTURES = {  # architecture → the module of vllm.model_executor.models that defines it
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
CONNECTOR = "CacheCraftConnector"
PLUGIN, ENDPOINT = "cachecraft", "cachecraft_http"  # names of the entry points, as in pyproject.toml


def register() -> None:
    """Entry point of `vllm.general_plugins`; may be called any number of times."""
    from vllm import ModelRegistry
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, f"cachecraft_rag.vllm.worker.models:{name}")
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "cachecraft_rag.vllm.worker.connector", CONNECTOR)
