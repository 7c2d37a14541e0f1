"""Retrieval: a question in, the most similar chunks with their chunk ids out.

`reading` turns files into chunks and `index` stores and searches them. The modules here bring the two together:
embedding models, indexing a folder, retrieval within a conversation, and the classes of LangChain and LlamaIndex.
Nothing here runs a language model.
"""
