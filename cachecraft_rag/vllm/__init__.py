"""Reuse of chunk-caches with a model that vLLM runs.

Import from here: `engine` (`VLLMEngine`) and what its processes share: `messages`, `settings`, `metrics`, `records`,
`served_model`, `plugin`. The sub-folder `worker` runs inside vLLM's engine and worker processes, `server` inside its
API server. The modules here import neither; `server` imports them and `worker` imports them.

Never here: anything that an engine without vLLM needs.
"""
