"""LlamaIndex: a query engine whose answers reuse chunk-caches, with any LlamaIndex retriever and vector store.

    from cachecraft_rag.llama_index import CacheCraftQueryEngine

    query_engine = CacheCraftQueryEngine.from_index(index, model="demo", store="chunk-caches/")
    response = query_engine.query("How many days do I have to return an appliance?")
    response.metadata["cachecraft"]["tokens_reused"]

It replaces `index.as_query_engine()`; `CacheCraftChatEngine.from_index(index, …)` replaces `index.as_chat_engine()`.
Retrieval stays as it is; `CacheCraftSynthesizer` and an `Engine` replace LlamaIndex's synthesizer and LLM. Nothing here
uses `Settings.llm`, whose default is OpenAI's.
"""

try:
    import llama_index.core  # noqa: F401  # imported here, so that one message serves all modules
except ImportError as error:
    raise ImportError(
        f"the LlamaIndex integration needs llama-index-core ({error}); type: pip install 'cachecraft-rag[llama-index]'"
    ) from error

from cachecraft_rag.llama_index.chat_engine import CacheCraftChatEngine
from cachecraft_rag.llama_index.llm import CacheCraftLLM
from cachecraft_rag.llama_index.query_engine import CacheCraftQueryEngine
from cachecraft_rag.llama_index.synced import SyncedVectorStore
from cachecraft_rag.llama_index.synthesizer import AnswerStatsEvent, CacheCraftSynthesizer

__all__ = [
    "AnswerStatsEvent",
    "CacheCraftChatEngine",
    "CacheCraftLLM",
    "CacheCraftQueryEngine",
    "CacheCraftSynthesizer",
    "SyncedVectorStore",
]
