"""What CUDA, ROCm and XPU share: a base for platforms, not one itself."""
