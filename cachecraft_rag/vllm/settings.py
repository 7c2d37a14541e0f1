"""Settings of the connector, in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from cachecraft_rag.checks import check_names
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.engine.settings import load_settings
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.server.settings import OFF, EndpointSettings
from cachecraft_rag.store.config import CACHE_FOLDER
from cachecraft_rag.store.remote.config import keys_in
from cachecraft_rag.vllm.beside import MULTI, Connector
from cachecraft_rag.vllm.options import TransferConfig, VLLMConfig, VLLMOptions
from cachecraft_rag.vllm.plugin import CONNECTOR, ENDPOINT, PLUGIN, SEAL_KEY
from cachecraft_rag.vllm.served_model import ModelIdentity, VLLMModel

_KEY = "settings"  # name of the settings in the extra config
_KEY_FILE = "admin_key_file"  # name of the file of `EndpointSettings.admin_keys` there
_PLUGINS = f"VLLM_PLUGINS={PLUGIN},{ENDPOINT}"

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


def check_tenants(endpoint: EndpointSettings, *, stores_responses: bool) -> None:
    """Raise ConfigError for a server with tenants whose vLLM keeps responses, which it finds by id alone."""
    if endpoint.tenant_header is not None and stores_responses:
        raise ConfigError(
            "stored responses do not keep tenants apart: unset VLLM_ENABLE_RESPONSES_API_STORE, or leave "
            "tenant_header out"
        )


def _own_config(transfer: TransferConfig | None) -> Mapping[str, Any]:
    """Return the extra config of this package's connector, alone or within `MultiConnector`, as its first connector."""
    if transfer is not None and transfer.kv_connector == CONNECTOR:
        return transfer.kv_connector_extra_config
    if transfer is not None and transfer.kv_connector == MULTI:
        connectors = transfer.kv_connector_extra_config.get("connectors") or [{}]
        first: Mapping[str, Any] = connectors[0]
        if first.get("kv_connector") == CONNECTOR:
            own: Mapping[str, Any] = first.get("kv_connector_extra_config", {})
            return own
    raise ConfigError(
        "vLLM runs without this package's connector: start the server with `cachecraft serve`, or name "
        f"{CONNECTOR} in --kv-transfer-config, alone or as the first one of {MULTI}"
    )


def _endpoint(extra: Mapping[str, object], *, root: str, model: str) -> EndpointSettings:
    """Return the settings of requests in a connector's extra config, which is JSON."""
    known = {field.name for field in fields(EndpointSettings)} - {"root", "model", "admin_keys"}
    check_names(extra, {*known, _KEY_FILE}, what="field of kv_connector_extra_config")
    given: dict[str, Any] = {name: value for name, value in extra.items() if name in known}
    file = extra.get(_KEY_FILE)
    keys = () if file is None else tuple(keys_in(Path(str(file))))
    return EndpointSettings(root=root, model=model, admin_keys=keys, **given)


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
    endpoint      settings of requests over HTTP
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
        """The server's own namespace, that of `config`; a tenant in a request's header names another one, or this."""
        return self.config.namespace

    @classmethod
    def of(cls, vllm_config: VLLMConfig) -> ConnectorSettings:
        """Return the settings in the config of a running vLLM; if `vllm serve` started it, those of `load_settings`.

        Then the model's files are read too, and `endpoint` is that of the connector's extra config. Raises ConfigError
        unless this package's connector runs alone or as the first of `MultiConnector`, or then without a key.
        """
        extra = _own_config(vllm_config.kv_transfer_config)
        settings = extra.get(_KEY)
        return settings if isinstance(settings, cls) else cls._of_environment(vllm_config, extra)

    @classmethod
    def _of_environment(
        cls, vllm_config: VLLMConfig, extra: Mapping[str, object]
    ) -> ConnectorSettings:
        """Return the settings of the environment, and of the connector's config for requests over HTTP.

        Each process of vLLM calls this. They inherit the environment, so they agree, also about the key.
        """
        settings = load_settings()
        key = os.environ.get(SEAL_KEY, "")
        if not key:
            raise ConfigError(f"{SEAL_KEY} is not set; name this package's plugin, {_PLUGINS}")
        model = vllm_config.model_config
        served = VLLMModel.load(
            model.model,
            dtype=str(model.dtype).removeprefix("torch."),
            options=VLLMOptions.of_running(vllm_config),
        )
        store = Path(settings["store"]).absolute()
        return cls(
            str(store / CACHE_FOLDER),
            served.identity,
            check_config(settings.engine_config()),
            key,
            endpoint=_endpoint(extra, root=str(store), model=str(model.served_model_name)),
        )

    def transfer_config(self, beside: Sequence[Connector] = ()) -> object:
        """Return a new `KVTransferConfig` of vLLM, which holds these settings and starts the connector with them.

        With connectors `beside`, it starts `MultiConnector`. Ours is the first one there, so it is asked first, and
        marks the blocks before others see them.
        """
        from vllm.config import KVTransferConfig

        ours = {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {_KEY: self},
        }
        both = {
            "kv_connector": MULTI,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [ours, *beside]},
        }
        # blocks that cannot be filled are computed, instead of refused
        return KVTransferConfig(**(both if beside else ours), kv_load_failure_policy="recompute")
