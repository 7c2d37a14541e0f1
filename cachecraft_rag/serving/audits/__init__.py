"""Audits: how often do answers with reuse equal full prefill's, measured on the answers that were really given?

Import from here: `predictions` (what reuse predicted, kept while an answer is decoded), `audit` (the comparison with
full prefill and its result), `audit_work` (the answers that wait, for all engines), `auditor` (computes audits in this
process) and `results` (what becomes of their results).
Imports the compute, store and planning folders, and the step loop.

Never here: intervals and reports over many audits (`evaluation.quality`), and answering.
"""
