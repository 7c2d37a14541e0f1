"""The Triton kernels: one per file, with its launcher and a plain torch reference of the same signature.

Numbers that change from request to request are `do_not_specialize`: each special case would be another compilation of
some seconds. `choice.uses_triton` says where they run. The torch kernels beside this folder run everywhere else.
"""
