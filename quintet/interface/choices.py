"""Indexers of sparse attention, as this rank sees them: what a layer chooses of a request for each of its tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenChoiceSpec:
    """An indexer of sparse attention: its top-k, the `count` tokens of its request that score highest for each token,
    which a layer with AttentionSpec.chosen then sees. Every rank has all of it. Source: DeepSeek-V3.2 (2025)."""

    head_dim: int  # of the one key that is kept of a token
    count: int
    dtype: torch.dtype
    page_size: int
    pool: int = 0  # tokens in a row that are chosen together, by the op choose_pools; 0: each by itself
    rate: int = 0  # not 0: of compressed entries, each made of so many tokens (DeepSeek-V4), and not of tokens


@dataclass(frozen=True)
class BlockChoiceSpec:
    """An indexer of block-sparse attention: the blocks of a request that score highest for each token, which a layer
    with AttentionSpec.chosen_block then sees. `op` of quintet/ops/sparse/blocks.py says how they are chosen."""

    op: str
    head_dim: int  # of the one key that is kept of a token
    block: int  # tokens
    count: int  # of blocks
    dtype: torch.dtype
    page_size: int
    local: int = 0  # of the last blocks, that of the token included, which are always chosen (choose_blocks)
