"""Prompt compressors, which shorten chunks instead of reusing their caches: baselines (Cache-Craft §5.1.4).

Each module is one compressor; `base` holds the interface.
"""
