"""The engine of an application: a model that answers questions, and its settings.

Import from here: `engine` (`Engine`, whose model runs in this process), `base` (the interface of all engines),
`capabilities` (calls that not every engine supports), `config` (`EngineConfig`), `settings` (flags, environment and
file) and `doctor` (advice for an operator). Imports every folder below: model, prompt, observability and serving.

Never here: retrieval, a framework's classes, vLLM, or the inside of a request.
"""
