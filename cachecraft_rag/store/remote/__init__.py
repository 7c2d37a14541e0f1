"""The remote tier: shared chunk-caches on a server that several engines use, see `docs/guides/remotes.md`.

What a remote does wrong, or too slowly, is a miss: nothing here raises on a request's path.
"""

from cachecraft_rag.store.remote.config import RemoteConfig, RemoteTuning
from cachecraft_rag.store.remote.stream import RemoteStream
from cachecraft_rag.store.remote.tier import RemoteStats, RemoteTier

__all__ = ["RemoteConfig", "RemoteStats", "RemoteStream", "RemoteTier", "RemoteTuning"]
