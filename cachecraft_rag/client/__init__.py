"""The client of a `cachecraft serve` server over HTTP.

Import from here: `http` (`HTTPEngine`). `link` makes bounded HTTP requests, `replies` checks what the server sent, and
`chat_template` renders its chat template in a process with limits (`template_process`). Imports engine, and from vllm
only the modules that describe requests and reports. vLLM need not be installed.

Never here: code that runs in the server, or a model's layers.
"""
