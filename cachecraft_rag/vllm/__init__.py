"""Reuse of chunk-caches with a model that vLLM runs.

Import from here: `engine` (`VLLMEngine`) and what its processes share: `messages`, `settings`, `metrics`, `records`,
`served_model`, `plugin`. The sub-folder `worker` runs inside vLLM's engine and worker processes, `server` inside its
API server, and `idle` holds the work that waits until the server is idle. The modules here and in `idle` import neither
`worker` nor `server`; both of these import them.

Never here: anything that an engine without vLLM needs.
"""
