"""Computing: partial prefill over a key/value buffer that stored chunk-caches fill in, and captures of what is new."""
