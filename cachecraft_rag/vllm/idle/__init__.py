"""Work over vLLM that waits until the server is idle: requests of our own, which give way to all others.

Import from here: `new_variants` (captures chunks that were reused and fixed) and `audits` (compares answers with full
prefill). Both hold the queue and the thread; `vllm.engine` makes the requests to vLLM.

Never here: the worker's and the server's side, and requests of users.
"""
