"""Comparison of tokens and log-probabilities: this engine with itself, transformers, a server, or a trainer's file."""
