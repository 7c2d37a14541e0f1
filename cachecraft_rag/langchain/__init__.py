"""LangChain: a generator and a chat model that reuse the chunk-caches of the documents they are given.

    chain = create_retrieval_chain(any_retriever, CacheCraftGenerator.from_pretrained("demo", store="chunk-caches"))

Documents reach the model one by one and not joined into one text, so the engine can reuse each document's chunk-cache.
Needs `langchain-core` and nothing else of LangChain: `pip install 'cachecraft-rag[langchain]'`.
"""

try:
    import langchain_core  # noqa: F401  # imported here, so that one message serves both modules
except ImportError as error:
    raise ImportError(f"{error}; type: pip install 'cachecraft-rag[langchain]'") from error

from cachecraft_rag.langchain.chat_model import ChatCacheCraft, conversation, with_outcomes
from cachecraft_rag.langchain.generator import CacheCraftGenerator
from cachecraft_rag.langchain.retriever import ConversationRetriever
from cachecraft_rag.langchain.synced import SyncedVectorStore

__all__ = [
    "CacheCraftGenerator",
    "ChatCacheCraft",
    "ConversationRetriever",
    "SyncedVectorStore",
    "conversation",
    "with_outcomes",
]
