"""The kernels in C for a CPU: chosen by the CPU's instructions, checked before use; torch serves where there are none."""
