"""LangChain: a chat model and a generator over the engine."""
