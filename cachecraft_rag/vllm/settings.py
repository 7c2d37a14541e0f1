"""Settings of the connector, in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.server.settings import OFF, EndpointSettings
from cachecraft_rag.vllm.options import VLLMConfig
from cachecraft_rag.vllm.plugin import CONNECTOR
from cachecraft_rag.vllm.served_model import ModelIdentity

_KEY = "settings"  # name of the settings in the extra config

# Engine options that vLLM decides itself → what to do instead.
_VLLM_DECIDES = {
    "device": "vLLM chooses the device",
    "tuning.decode_rows": "vLLM batches answers itself; its max_num_seqs limits a batch",
    "tuning.max_waiting": "vLLM has its own queue, which max_num_queued_reqs limits",
    "tuning.preload_bytes": "vLLM has its own queue, and the requests that it has begun load",
    "tuning.wait_timeout_s": "vLLM has its own queue; limit the wait in a router in front of the server",
}
_MEMORY = "vLLM has the device's memory; its own prefix cache takes the device tier's place"


def check_config(config: EngineConfig) -> EngineConfig:
    """Return a copy of the config with `OFF` applied: `reuse.plain_prompts` is "off" in it.

    Raises ConfigError for the first option that has no effect over vLLM (`_VLLM_DECIDES`, new variants "always", the
    text of audits, and `device` and `device_bytes` of the store), and for a quality target without audits, or together
    with a recompute ratio or α. Usual values are accepted.
    """
    config.require_usable_target()
    usual = EngineConfig()
    wrong = {
        name: why
        for name, why in _VLLM_DECIDES.items()
        if attrgetter(name)(config) != attrgetter(name)(usual)
    }
    if getattr(config.new_variants, "when", "") == "always":
        wrong["new_variants"] = "they are made while no request is under way"
    if getattr(config.audit, "keep_text", False):
        wrong["audit_text"] = "a server computes what audits need, and no further text"
    # an option named "device" is the engine's, so the store's needs its full name
    wrong |= {
        "store.device" if name == "device" else name: _MEMORY
        for name in ("device", "device_bytes")
        if getattr(config.store, name) != getattr(usual.store, name)
    }
    for name, why in wrong.items():
        raise ConfigError(f"{name} has no effect over vLLM: {why}. Leave it out")
    return replace(config, reuse=replace(config.reuse, **OFF))


@dataclass(frozen=True)
class ConnectorSettings:
    """Settings of one server, pickled on their way to vLLM's processes.

    store         folder of the chunk-caches
    identity      identity of the served model
    config        config of the engine; see `check_config`
    key           key that signs messages about requests between the parts of the server, see `messages.Ask`
    fill_at_once  most requests whose prompts are filled at the same time. Each has a separate buffer of
                  `2 · layers · kv_heads · head_dim` numbers per token, see `worker.fill_memory`
    least_rows    rows that may be computed for these requests in a step even if vLLM's own requests use all its tokens
    """

    store: str
    identity: ModelIdentity
    config: EngineConfig = field(default_factory=EngineConfig)
    key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    fill_at_once: int = 8
    least_rows: int = 256
    endpoint: EndpointSettings = field(default_factory=EndpointSettings)

    @property
    def namespace(self) -> str:
        """The namespace of `config`, that is the tenant; chunk-caches are never shared between namespaces."""
        return self.config.namespace

    @classmethod
    def of(cls, vllm_config: VLLMConfig) -> ConnectorSettings:
        """Return the settings in the config of a running vLLM. Raises ConfigError if this package did not start it."""
        transfer = vllm_config.kv_transfer_config
        extra: Mapping[str, object] = {} if transfer is None else transfer.kv_connector_extra_config
        settings = extra.get(_KEY)
        if not isinstance(settings, cls):
            raise ConfigError(
                "vLLM runs without this package's settings: start the server with `cachecraft serve`"
            )
        return settings

    def transfer_config(self) -> object:
        """Return a new `KVTransferConfig` of vLLM, which holds these settings and starts the connector with them."""
        from vllm.config import KVTransferConfig

        return KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_role="kv_both",
            kv_connector_extra_config={_KEY: self},
            # blocks that cannot be filled are computed, instead of refused
            kv_load_failure_policy="recompute",
        )
