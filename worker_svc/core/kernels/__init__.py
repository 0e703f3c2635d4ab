"""Kernels by what they do, most of them Triton's. Only CUDA backends import them; they import nothing above them."""
