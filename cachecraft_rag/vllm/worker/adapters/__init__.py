"""LoRA adapters of requests, on both sides of vLLM.

Import from here: `files` (in the scheduler: the fingerprint of the model with an adapter) and `active` (in each worker:
the adapter of a pass).

Never here: loading adapters, which is vLLM's.
"""
