"""Stored tokens that are wrong in a new context: which ones matter to the question, and how are they mended?

`probe` and `focus` measure the question's attention, and `drift_correction` moves stale tokens. They observe or change
a `RowPass`; they never start one.
"""
