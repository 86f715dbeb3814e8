"""Op providers of the CPU platform: kernels of `csrc/cpu`, and torch fallbacks."""
