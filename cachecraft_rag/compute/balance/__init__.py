"""The balance of computing and loading: how much of a prompt is computed while the rest is loaded?

`speed` estimates the time of a pass and `load_split` decides. Both are pure: no clock, no tensors, no I/O.
"""
