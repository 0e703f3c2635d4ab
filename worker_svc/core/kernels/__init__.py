"""Triton kernels, one noun a file. Nothing outside this package imports triton, and only CUDA backends import this."""
