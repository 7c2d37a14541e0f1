"""Reading chunk-caches while the model computes."""
