"""Tokenizers, incremental detokenization, the bytes of tokens, and stop strings."""
