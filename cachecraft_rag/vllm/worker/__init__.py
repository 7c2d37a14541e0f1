"""Parts that run inside vLLM's engine core and worker processes.

Import from here: `connector` (what vLLM calls). Its two ends are `scheduling` (in the scheduler: which chunk-caches a
request gets) and `working` (in each worker: fills KV blocks and captures). vLLM loads `connector` and `models` by the
names that `vllm/plugin.py` registers.

Never here: HTTP, prompts as text, or imports from `vllm.server`.
"""
