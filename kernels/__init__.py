"""Tensor kernels: rotary embedding, attention, placing of chunk-caches. Import the modules, not this package.

Keep this file free of imports and of a version: Hugging Face has a package named `kernels` too, and transformers
imports whatever it finds under that name, which is this folder whenever the repository is the current directory.
"""
