"""How does an application ask a model in this process, and with which settings?

Import from here: `engine` (`Engine`), `base` (the interface that all engines share), `config` (`EngineConfig`),
`settings` (flags, environment and file) and `doctor` (advice for an operator). Imports every folder below: model,
prompt, observability and serving.

Never here: retrieval, a framework's classes, vLLM, or the inside of a request.
"""
