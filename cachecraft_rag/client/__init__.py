"""The client of a `cachecraft serve` server over HTTP.

Import from here: `http` (`HTTPEngine`). `link` makes bounded HTTP requests, `replies` checks what the server sent, and
`chat_template` renders its chat template in a process with limits (`template_process`). Imports `server.wire` and
`server.served_model`, nothing from `vllm`.

Never here: code that runs in the server, or a model's layers.
"""
