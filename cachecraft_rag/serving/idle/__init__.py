"""Work in idle time: what begins next, how it gives way, and how it ends.

Import from here: `work` (the same for all engines) and `loop_runner` (computes it in this process). Kinds of work are
`serving.new_variants` and `serving.audits`; over vLLM, `vllm.idle` computes them.

Never here: what is computed, and code for another backend such as vLLM.
"""
