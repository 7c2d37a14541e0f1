"""Settings of the connector, in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from cachecraft_rag.checks import check_choice, check_flag, check_text
from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import PlainPromptsMode
from cachecraft_rag.vllm.plugin import CONNECTOR
from cachecraft_rag.vllm.served_model import ModelIdentity

_KEY = "settings"  # in the extra config


ClientSettings = Literal["none", "safe", "all"]
# Of `ReuseConfig`: an engine over vLLM reuses chunks only, a server's endpoint prompts as well (`EndpointSettings`).
OFF: Mapping[str, Any] = {"plain_prompts": "off"}
# Options of an engine that vLLM decides itself, and what to do instead.
_VLLM_DECIDES = {
    "device": "vLLM chooses the device",
    "decode_rows": "vLLM batches answers itself; its max_num_seqs limits a batch",
    "max_waiting": "vLLM has a queue of its own, with a limit of its own: max_num_queued_reqs",
    "wait_timeout_s": "vLLM has a queue of its own; limit the wait where requests come in, in a router",
}
_MEMORY = "vLLM has the device's memory; its own prefix cache takes the device tier's place"


def check_config(config: EngineConfig) -> EngineConfig:
    """Return it with what this backend has not switched off. Raises ConfigError for an option that would have no
    effect here.
    """
    usual = EngineConfig()
    wrong = {name: why for name, why in _VLLM_DECIDES.items() if getattr(config, name) != getattr(usual, name)}
    if getattr(config.new_variants, "when", "") == "always":
        wrong["new_variants"] = "they are made while no request is under way"
    if getattr(config.audit, "share", 0.0):
        wrong["audit"] = "answers are audited by the transformers backend only"
    if config.quality_target is not None:
        wrong["quality_target"] = "it needs audits, and answers are audited by the transformers backend only"
    if config.reuse.refresh_rows:
        wrong["reuse.refresh_rows"] = "a decode step carries rows of the answer only"
    wrong |= {
        name: _MEMORY
        for name in ("device", "device_bytes")
        if getattr(config.store, name) != getattr(usual.store, name)
    }
    for name, why in wrong.items():
        raise ConfigError(f"{name} has no effect over vLLM: {why}. Leave it out")
    return replace(config, reuse=replace(config.reuse, **OFF))


@dataclass(frozen=True)
class EndpointSettings:
    """Settings of requests over HTTP; set by the server's operator, never by a request's body.

    root             folder of the store, where a calibration lies
    model            the name that clients know the model by
    shared_system    other instructions, which clients send as system messages, are nobody's private text: captures
                     behind them serve everybody
    session_header   the header that names a request's session, set by a trusted proxy; None: no sessions
    client_settings  settings of reuse that a request may bring: "none"; "safe", those that shape its own answer alone;
                     "all"
    plain_prompts    of text in requests without documents, see `server.unmarked.PlainPrompts`
    search_system    their system messages are searched, too: applications may put the context there
    admin_keys       one of them is asked for to prime and evict, besides vLLM's own key; none: everybody may
    """

    root: str = ""
    model: str = ""
    shared_system: bool = False
    session_header: str | None = None
    client_settings: ClientSettings = "safe"
    plain_prompts: PlainPromptsMode = "off"
    search_system: bool = False
    admin_keys: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        for name in ("root", "model"):
            check_text(name, getattr(self, name))
        check_flag("shared_system", self.shared_system)
        check_flag("search_system", self.search_system)
        check_text("session_header", self.session_header, optional=True, empty=False)
        check_choice("plain_prompts", self.plain_prompts, get_args(PlainPromptsMode))
        check_choice("client_settings", self.client_settings, get_args(ClientSettings))
        if self.search_system and self.plain_prompts == "off":
            raise ConfigError("search_system has no effect without plain_prompts: add --reuse-plain-prompts")


@dataclass(frozen=True)
class ConnectorSettings:
    """Settings of one server, pickled on their way to vLLM's processes.

    store         folder of its chunk-caches
    identity      of the model that it serves
    config        of the engine; see `check_config`
    key           seals messages about requests between the parts of the server, see `messages.Ask`
    fill_at_once  most requests whose prompts are filled at the same time: each has a buffer of its own outside
                  vLLM's accounts, `2 · layers · kv_heads · head_dim` numbers for each token
    least_rows    rows computed for them in a step even where vLLM's own requests have used up its tokens
    """

    store: str
    identity: ModelIdentity
    config: EngineConfig = field(default_factory=EngineConfig)
    key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    fill_at_once: int = 8
    least_rows: int = 256
    endpoint: EndpointSettings = EndpointSettings()

    @property
    def namespace(self) -> str:
        """The tenant; chunk-caches never cross it."""
        return self.config.namespace

    @classmethod
    def of(cls, vllm_config: Any) -> ConnectorSettings:
        """Settings of a running vLLM. Raises ConfigError where it was not started by this package."""
        transfer = vllm_config.kv_transfer_config
        extra: Mapping[str, Any] = {} if transfer is None else transfer.kv_connector_extra_config
        found = extra.get(_KEY)
        if not isinstance(found, cls):
            raise ConfigError("vLLM runs without this package's settings: start the server with `cachecraft serve`")
        return found

    def transfer_config(self) -> Any:
        """vLLM's `KVTransferConfig` that starts the connector with these settings."""
        from vllm.config import KVTransferConfig

        return KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_role="kv_both",
            kv_connector_extra_config={_KEY: self},
            kv_load_failure_policy="recompute",  # blocks that cannot be filled are computed, instead of refused
        )
