"""Commands that measure answers: `eval`, `calibrate` and `quality`.

Import from here: `evaluate` (options that measuring commands share). Never here: measurements themselves, which are in
`cachecraft_rag.evaluation`.
"""
