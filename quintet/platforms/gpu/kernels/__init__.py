"""Triton kernels; each is tested against its specification in Triton's interpreter, and compiled ahead."""
