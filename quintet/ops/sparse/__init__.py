"""Sparse attention of blocks: what indexers choose, and attention to it."""

from quintet.ops.sparse import blocks

__all__ = ["blocks"]
