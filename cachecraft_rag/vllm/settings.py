"""What the connector is told at start-up, in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from cachecraft_rag.checks import check_flag, check_mapping, check_names, check_path, check_text, check_whole
from cachecraft_rag.engine.prompt import DEFAULT_SYSTEM
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store import StoreConfig
from cachecraft_rag.store.remote import RemoteConfig
from cachecraft_rag.vllm.plugin import CONNECTOR


@dataclass(frozen=True)
class EndpointSettings:
    """How a server takes requests with documents over HTTP; only its operator says so, never a request's body.

    root            folder of the store, where a calibration lies
    model           the name that clients know the model by
    system          the instruction in front of every prompt
    shared_system   whether other instructions, which clients send as system messages, are nobody's private text:
                    what is captured behind them then serves everybody
    session_header  the header that names a request's session, set by a proxy that is trusted; None: no sessions
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
    """Settings of one server.

    store       folder of its chunk-caches
    key         seals what the parts of the server tell each other about requests, see `messages.Ask`
    namespace   the tenant; chunk-caches never cross it
    caches      fields of `StoreConfig`; `remote` as a URL or as fields of `RemoteConfig`
    fill_at_once  most requests whose prompts are filled at the same time: each has a buffer of its own outside
                vLLM's accounts, `2 · layers · kv_heads · head_dim` numbers for each token
    least_rows  rows computed for them in a step even where vLLM's own requests have used up its tokens
    endpoint    fields of `EndpointSettings`
    """

    store: str
    key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    namespace: str = "default"
    caches: Mapping[str, Any] = field(default_factory=dict)
    fill_at_once: int = 8
    least_rows: int = 256
    endpoint: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every field; raises ConfigError."""
        check_path("store", self.store)
        check_text("key", self.key, empty=False)
        check_text("namespace", self.namespace)
        check_mapping("caches", self.caches)
        check_whole("fill_at_once", self.fill_at_once, least=1)
        check_whole("least_rows", self.least_rows, least=1)
        check_mapping("endpoint", self.endpoint)
        _ = self.store_config, self.endpoint_settings

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Self:
        """From the extra config. Raises ConfigError for what is missing, unknown or out of range."""
        check_names(extra, [one.name for one in fields(cls)], what="setting of the connector")
        missing = [name for name in ("store", "key") if name not in extra]
        if missing:
            raise ConfigError(f"kv_connector_extra_config has no {' and no '.join(missing)}")
        return cls(**extra)

    @property
    def endpoint_settings(self) -> EndpointSettings:
        """How requests over HTTP are taken."""
        check_names(self.endpoint, EndpointSettings.__dataclass_fields__, what="setting of the endpoint")
        return EndpointSettings(**self.endpoint)

    @property
    def store_config(self) -> StoreConfig:
        """How the chunk-caches are opened."""
        given = dict(self.caches)
        check_names(given, StoreConfig.__dataclass_fields__, what="store setting")
        if isinstance(remote := given.get("remote"), Mapping):
            check_names(remote, RemoteConfig.__dataclass_fields__, what="setting of the remote")
            given["remote"] = RemoteConfig(**remote)
        return StoreConfig(**given)

    def transfer_config(self) -> Any:
        """vLLM's `KVTransferConfig` that starts the connector with these settings."""
        from vllm.config import KVTransferConfig

        return KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_role="kv_both",
            kv_connector_extra_config=self.extra(),
            kv_load_failure_policy="recompute",  # what cannot be filled is computed, instead of refused
        )

    def extra(self) -> dict[str, Any]:
        """For `kv_connector_extra_config`; read back by `read`."""
        return {one.name: getattr(self, one.name) for one in fields(self)} | {
            "caches": dict(self.caches),
            "endpoint": dict(self.endpoint),
        }
