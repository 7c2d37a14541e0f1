"""Work over vLLM that waits until the server is idle: requests of our own, which give way to all others.

Import from here: `new_variants` (captures chunks that were reused and fixed) and `audits` (compares answers with full
prefill). `serving.idle.work` decides what begins and how it ends, in `threads`; `vllm.engine` makes the requests.

Never here: the worker's and the server's side, and requests of users.
"""
