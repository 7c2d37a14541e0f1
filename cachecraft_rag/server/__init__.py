"""Parts that every server of this package and its client share, and the server over an engine in this process.

Import from here: `wire` (names, limits and versions of messages), `served_model`, `settings`, `documents` (a chat
request with documents, parsed), and `local` (the server without vLLM). `vllm.server` and `client` import from here.

Never here: imports from `vllm` or `client`.
"""
