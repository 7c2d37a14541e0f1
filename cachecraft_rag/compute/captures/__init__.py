"""New chunk-caches: how are computed chunks recorded, described and handed to the store?

`capture` records during a pass and computes attention statistics; `write_back` does this in the background.
Never here: file formats and eviction (see `store`).
"""
