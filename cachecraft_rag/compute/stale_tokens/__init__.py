"""Stored tokens that are wrong in a new context: which ones matter to the question, and how are they mended?

`probe` and `focus` measure the question's attention, `drift_correction` moves stale tokens, and `refresh` recomputes
some while decoding. They observe or change a `RowPass`; they never start one.
"""
