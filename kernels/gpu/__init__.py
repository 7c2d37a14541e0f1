"""The Triton kernels, one per file with its launcher. The tests hold a plain torch reference of the same signature.

Numbers that change from request to request are `do_not_specialize`, because each special case would be another
compilation of some seconds. `choice` decides if they run; otherwise the torch operations of the parent
folder do.
"""
