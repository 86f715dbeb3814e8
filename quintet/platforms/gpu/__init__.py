"""Base of the CUDA, ROCm and XPU platforms; not a platform itself."""
