"""cachecraft-rag: faster answers over retrieved chunks, by reusing their stored keys and values.

    from cachecraft_rag import CacheCraft

    rag = CacheCraft.from_pretrained("demo", store="chunk-caches/")
    rag.add_documents("docs/")
    answer = rag.ask("How many days do I have to return an appliance?")

The public names are imported on first use (PEP 562), so that `import cachecraft_rag` costs milliseconds and loads
neither torch nor transformers: a command line that only prints its help must not wait for them.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cachecraft_rag.engine.config import EngineConfig
    from cachecraft_rag.engine.engine import Engine
    from cachecraft_rag.errors import CacheCraftError
    from cachecraft_rag.model.decoder import Decoder
    from cachecraft_rag.observability.stats import Answer, RequestStats
    from cachecraft_rag.planning.config import ReuseConfig
    from cachecraft_rag.rag import CacheCraft
    from cachecraft_rag.serving.sampling import SamplingParams
    from cachecraft_rag.store import ChunkCacheStore
    from cachecraft_rag.types.documents import Chunk, Document

__all__ = [
    "Answer",
    "CacheCraft",
    "CacheCraftError",
    "Chunk",
    "ChunkCacheStore",
    "Decoder",
    "Document",
    "Engine",
    "EngineConfig",
    "RequestStats",
    "ReuseConfig",
    "SamplingParams",
]

_HOME = {
    "Answer": "observability.stats",
    "CacheCraft": "rag",
    "CacheCraftError": "errors",
    "Chunk": "types.documents",
    "ChunkCacheStore": "store",
    "Decoder": "model.decoder",
    "Document": "types.documents",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "RequestStats": "observability.stats",
    "ReuseConfig": "planning.config",
    "SamplingParams": "serving.sampling",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(_module(_HOME[name], name), name)
    globals()[name] = value  # the next access finds it without this function
    return value


def _module(path: str, name: str) -> ModuleType:
    """Import the module of a public name; MissingPackageError if a package is missing, as torch beside the client."""
    from cachecraft_rag.checks import from_extra

    with from_extra("", name):
        return import_module(f"{__name__}.{path}")


def __dir__() -> list[str]:
    """The public names, loaded or not, for completion in a shell."""
    return sorted([*globals(), *__all__])
