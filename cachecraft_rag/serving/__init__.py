"""Many requests that share one model in this process.

Import from here: the folder `loop` (the thread that owns the model), `admission` (the queue of waiting requests),
`chunks_in_progress` (waiting for chunks that another request computes, for all engines), `answering` (one request from
look-up to last token), `request` (one request, its progress and its statistics),
`sampling` and `answer_text` (from logits to tokens, from tokens to text), `token_queue` and `generation` (how text
reaches the reader), and background work: `capturing`, `priming`, `new_variants`, and the folders `audits` and `idle`
(work in idle time). Imports model, prompt and observability.

Never here: loading a model, options of the command line, or code for another backend such as vLLM.
"""
