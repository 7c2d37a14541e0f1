"""Files in, chunks out: which files there are, what text they hold, and where it is split.

Others import `documents` and `chunking`. Nothing here knows the index, an embedding model or a framework.
"""
