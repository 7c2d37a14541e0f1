"""How the bytes of a chunk-cache are encoded."""
