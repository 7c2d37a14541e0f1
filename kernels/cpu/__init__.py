"""Kernels in C for a CPU, chosen by its instructions and checked before use; without them torch does the same."""
