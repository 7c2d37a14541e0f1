"""Settings of the connector, in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cachecraft_rag.checks import check_flag, check_text
from cachecraft_rag.engine.prompt import DEFAULT_SYSTEM
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store import StoreConfig
from cachecraft_rag.vllm.plugin import CONNECTOR
from cachecraft_rag.vllm.served_model import ModelIdentity

_KEY = "settings"  # in the extra config


@dataclass(frozen=True)
class EndpointSettings:
    """Settings of requests with documents over HTTP; set by the server's operator, never by a request's body.

    root            folder of the store, where a calibration lies
    model           the name that clients know the model by
    system          the instruction in front of every prompt
    shared_system   other instructions, which clients send as system messages, are nobody's private text: captures
                    behind them serve everybody
    session_header  the header that names a request's session, set by a trusted proxy; None: no sessions
    """

    root: str = ""
    model: str = ""
    system: str = DEFAULT_SYSTEM
    shared_system: bool = False
    session_header: str | None = None

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        for name in ("root", "model", "system"):
            check_text(name, getattr(self, name))
        check_flag("shared_system", self.shared_system)
        check_text("session_header", self.session_header, optional=True, empty=False)


@dataclass(frozen=True)
class ConnectorSettings:
    """Settings of one server, pickled on their way to vLLM's processes.

    store         folder of its chunk-caches
    identity      of the model that it serves
    key           seals messages about requests between the parts of the server, see `messages.Ask`
    namespace     the tenant; chunk-caches never cross it
    caches        how the chunk-caches are opened
    fill_at_once  most requests whose prompts are filled at the same time: each has a buffer of its own outside
                  vLLM's accounts, `2 · layers · kv_heads · head_dim` numbers for each token
    least_rows    rows computed for them in a step even where vLLM's own requests have used up its tokens
    """

    store: str
    identity: ModelIdentity
    key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    namespace: str = "default"
    caches: StoreConfig = field(default_factory=StoreConfig)
    fill_at_once: int = 8
    least_rows: int = 256
    endpoint: EndpointSettings = EndpointSettings()

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
