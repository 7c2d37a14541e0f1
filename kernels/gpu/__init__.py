"""The Triton kernels: one per file, with its launcher and a plain torch reference of the same signature.

`choice.uses_triton` says where they run. The torch kernels beside this folder run everywhere else.
"""
