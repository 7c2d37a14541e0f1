"""Parts that run inside vLLM's API server.

Import from here: `launch` (starts the server), `endpoint` (its routes), `documents` (a chat request with documents,
parsed) and `unmarked` (reuse in requests without documents). vLLM loads `endpoint` by its entry point.

Never here: tensors, the model's layers, or imports from `vllm.worker`.
"""
