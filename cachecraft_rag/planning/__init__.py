"""Planning: which chunk-caches are reused and which tokens are recomputed. Pure functions, no tensors, no I/O."""
