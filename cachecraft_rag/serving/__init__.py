"""How do many requests share one model in this process?

Import from here: `step_loop` (the thread that owns the model), `admission` (the queue of waiting requests),
`scheduling` (which prefills run together), `answering` (one request from look-up to last token), `sampling`,
`token_queue` and `generation` (how pieces reach the reader), and background work: `priming`, `new_variants`. Imports
model, prompt and observability.

Never here: loading a model, options of the command line, or code for another backend such as vLLM.
"""
