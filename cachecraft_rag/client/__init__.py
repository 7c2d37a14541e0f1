"""How does an application use a `cachecraft serve` server over HTTP?

Import from here: `http` (`HTTPEngine`). Imports engine, and from vllm only the modules that describe requests and
reports. vLLM need not be installed.

Never here: code that runs in the server, or a model's layers.
"""
