"""Readers of the published formats of question sets; `registry` lists them."""
