"""Op providers that CUDA, ROCm and XPU share: Triton kernels of `kernels/`, and torch fallbacks."""
