"""Retrieval: the FAISS store that returns chunk ids, and the embedding models."""
