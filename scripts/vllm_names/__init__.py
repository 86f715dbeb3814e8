"""Counts vLLM's public names, and which of them quintet has."""
