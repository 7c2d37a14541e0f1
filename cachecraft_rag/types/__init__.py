"""Frozen dataclasses and names that several folders share; no behaviour beyond identity.

Import from here: `documents` (documents, chunks and search results: text with metadata), `prompts` (prompts as segments
of token ids), `kv_layout`, `variants` and `captures` (chunk-caches: their shape, stored ones and new ones),
`store_reasons` (why one was not loaded, not stored, or evicted), `digests`, `versions` and `progress`. Imports errors.

Never here: tensor operations, I/O, or a decision.

Shape legend, used in every docstring: `layers` decoder layers; `tokens` tokens of one chunk; `kv_heads` key/value
heads; `heads` query heads; `head_dim` width of a head; `rows` token positions computed in the current pass; `keys`
all positions of the prompt so far. A chunk-cache is `[layers, 2, tokens, kv_heads, head_dim]`: raw keys (before
rotary embedding) at index 0, values at index 1.
"""
