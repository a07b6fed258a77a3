"""Numba kernels: arrays in, arrays out. They import NumPy and Numba alone."""
