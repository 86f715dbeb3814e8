"""Attention to a window of tokens and to compressed entries, one for every few tokens (DeepSeek-V4, 2026)."""

from quintet.ops.compressed import attention, entries

__all__ = ["attention", "entries"]
