"""The same engine inside vLLM: a connector that fills a request's KV blocks from chunk-caches."""
