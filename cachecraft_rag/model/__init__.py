"""A Hugging Face model: how it is loaded, divided into layers, checked and identified.

Import from here: `decoder` (the model's layers as a stack), `fused_layers` and `attention_choice` (faster ways to
compute the same), `self_check`, `fingerprint`, `demo_model`, and facts about a model: `facts`, `sizes`,
`chunk_bound`. Imports kernels, store and compute.

Never here: prompts, requests, threads, or anything that knows that there is more than one request.
"""
