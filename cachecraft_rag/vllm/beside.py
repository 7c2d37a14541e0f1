"""Other KV connectors of the same server, inside vLLM's `MultiConnector` and after ours.

`MultiConnector` lets every connector save all blocks, also those that were filled from chunk-caches and may be
approximate. A connector that finds blocks by vLLM's own hashes keeps them apart, because `worker.block_hashes` divides
these. One that finds them by their tokens would serve them to requests without documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.server.settings import ClientSettings
from cachecraft_rag.vllm.plugin import CONNECTOR

MULTI = "MultiConnector"
Connector = Mapping[str, object]  # the fields of one `KVTransferConfig`

# Connectors that find blocks by vLLM's hashes, or only for a request that names the other server.
_DIVIDED = (
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "NixlConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
)


def connectors_in(given: Any) -> list[Connector]:
    """Return the connectors in the operator's `KVTransferConfig`: it alone, or those in `MultiConnector`'s list.

    Each is field name → value; of one alone, those but `engine_id` that differ from vLLM's defaults. None gives [].
    """
    if given is None:
        return []
    if given.kv_connector == MULTI:
        return list(given.kv_connector_extra_config.get("connectors") or ())
    usual = type(given)()
    names = {field.name for field in fields(given)} - {"engine_id"}  # vLLM passes this one itself
    changed = {name: getattr(given, name) for name in sorted(names)}
    return [{name: value for name, value in changed.items() if value != getattr(usual, name)}]


def check_beside(
    connectors: Sequence[Connector], reuse: ReuseConfig, client_settings: ClientSettings
) -> None:
    """Raise ConfigError for our own connector, and for one that may serve approximate blocks to other requests.

    It may unless it is known to find blocks by vLLM's hashes, or all reuse is exact: ratio 1, no "published" early
    termination, and `client_settings` "none".
    """
    if any(connector.get("kv_connector") == CONNECTOR for connector in connectors):
        raise ConfigError(
            f"--kv-transfer-config: {CONNECTOR} is there already: name only connectors to run beside it"
        )
    is_exact = reuse.ratio_in_use == 1.0 and reuse.method.early_termination != "published"
    if is_exact and client_settings == "none":
        return
    for connector in connectors:
        name = str(connector.get("kv_connector"))
        if name not in _DIVIDED:
            raise ConfigError(
                f"--kv-transfer-config: {name} may find blocks by their tokens, and would serve approximate blocks to "
                f"requests without documents: take one of {', '.join(_DIVIDED)}, or set --recompute-ratio 1 and "
                "--client-settings none"
            )
