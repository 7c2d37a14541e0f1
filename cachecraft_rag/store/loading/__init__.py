"""Loading stored chunk-caches in the background while a request computes."""
