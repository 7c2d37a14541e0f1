"""The retrieval index: chunks, vectors and owners in SQLite, searched with FAISS, filtered by metadata.

Others import `faiss_store`, `filters` and `removal`. Nothing here reads files, embeds texts or knows a framework.
"""
