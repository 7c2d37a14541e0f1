"""Haystack: a generator whose answers reuse the chunk-caches of its documents, and a component that primes them.

    pipeline.add_component("generator", CacheCraftGenerator("demo", store="chunk-caches"))
    pipeline.connect("retriever.documents", "generator.documents")

The generator takes the place of a PromptBuilder and an OpenAIGenerator: the documents reach the model one by one.
"""

try:
    import haystack  # noqa: F401  # imported here, so that one message serves all modules
except ImportError as error:
    raise ImportError(f"{error}; type: pip install 'cachecraft-rag[haystack]'") from error

from cachecraft_rag.haystack.components import CacheCraftGenerator, CacheCraftPrimer

__all__ = ["CacheCraftGenerator", "CacheCraftPrimer"]
