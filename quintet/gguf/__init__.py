"""GGUF files (llama.cpp's format, versions 2 and 3): what is in one, bounded by its size. Knows no torch, no model."""
