"""A request on the model: decide what is reused, compute the rest among stored chunk-caches, and decode.

`resolve` makes a `PrefillJob`, `OverlappedPrefill` executes it as steps, `driver` runs the steps, and `decode` goes on
in the same `KVBuffer`. `Stack` (in `stack`) is the only view of the model from here. `warm_up` compiles GPU kernels.

Sub-folders: `stale_tokens` chooses and mends stored tokens that are wrong in a new context, `captures` records and
stores new chunks, `balance` splits a prompt between computing and loading.

Imports kernels, planning and store. Never here: tokenizers, text, threads of a server, or one model's classes.
"""
