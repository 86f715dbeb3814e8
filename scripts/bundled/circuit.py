"""The weights at the start: zero outputs, and two attention layers that can already copy.

Copying is most of what the model does, and the heads for it (an induction circuit, Olsson et al. 2022) take longer to
be found than the whole training lasts. So they are set by hand and then trained like all other weights. A space is a
token of its own, so a place is known by the two tokens before it, not by one.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

CONSTANT = 0  # the dimension of the embedding that is the same for every token; it cancels in the softmax
CONSTANT_SHARE = 0.3  # of the norm of the embedding
NEAR_PAIRS = 8  # the fastest rotary pairs tell neighbours apart; content is matched on the slower ones
# Gains that make the right score about 6 above the others after the division by sqrt(head_dim).
SHIFT_GAIN = 1.4
MATCH_GAIN = 1.6
WRITE = 0.08  # what a head of norm 8 adds to a stream whose norm is about 0.8


def frequencies(config) -> torch.Tensor:
    """Angle per position of each rotary pair (i, i + head_dim / 2): [head_dim / 2]."""
    half = config.head_dim // 2
    return config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)


def orthonormal(rows: int, columns: int) -> torch.Tensor:
    """Random orthonormal rows that do not read the constant."""
    matrix = torch.linalg.qr(torch.randn(columns, rows))[0].T.contiguous()
    matrix[:, CONSTANT] = 0
    return matrix


def look_back(attention, config, kv: int, distance: int, read: torch.Tensor, write: torch.Tensor) -> None:
    """The first query head of a kv group reads `distance` tokens back: `read` is [D, H], `write` is [H, D]."""
    width, half = config.head_dim, config.head_dim // 2
    query = kv * width * config.num_attention_heads // config.num_key_value_heads
    attention.q_proj.weight[query : query + width] = 0
    attention.k_proj.weight[kv * width : (kv + 1) * width] = 0
    for pair, angle in enumerate(frequencies(config)[:NEAR_PAIRS].tolist()):
        turn = torch.tensor(angle * distance)
        attention.q_proj.weight[query + pair, CONSTANT] = SHIFT_GAIN * turn.cos()
        attention.q_proj.weight[query + pair + half, CONSTANT] = -SHIFT_GAIN * turn.sin()
        attention.k_proj.weight[kv * width + pair, CONSTANT] = SHIFT_GAIN
    attention.v_proj.weight[kv * width : (kv + 1) * width] = read
    attention.o_proj.weight[:, query : query + width] = WRITE * write


def follow(attention, config, kv: int, reads: tuple[torch.Tensor, ...]) -> None:
    """Attends to where the last two tokens stood before, one place on, and writes the token that is there."""
    current, last, before = reads  # [D, H] each: content of this token, of the one before, of the one before that
    width, half = config.head_dim, config.head_dim // 2
    query = kv * width * config.num_attention_heads // config.num_key_value_heads
    pairs = torch.arange(half)
    one = (pairs >= NEAR_PAIRS) & (pairs % 2 == kv)  # matches this token with the one before the place
    two = (pairs >= NEAR_PAIRS) & (pairs % 2 != kv)  # and the token before this with the one before that
    one, two = one.repeat(2)[:, None], two.repeat(2)[:, None]
    attention.q_proj.weight[query : query + width] = MATCH_GAIN * (one * current + two * last)
    attention.k_proj.weight[kv * width : (kv + 1) * width] = MATCH_GAIN * (one * last + two * before)
    copied = orthonormal(width, config.hidden_size)
    attention.v_proj.weight[kv * width : (kv + 1) * width] = copied
    attention.o_proj.weight[:, query : query + width] = WRITE * copied.T


@torch.no_grad()
def initialise(model: LlamaForCausalLM) -> None:
    config = model.config
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=0.05)
    embedding[:, CONSTANT] = CONSTANT_SHARE * 0.05 * config.hidden_size**0.5
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    content = orthonormal(config.head_dim, config.hidden_size)
    spaces = orthonormal(2 * config.head_dim, config.hidden_size).split(config.head_dim)
    for kv, space in enumerate(spaces):
        look_back(first, config, kv, kv + 1, content, space.T)
    for kv in range(2):
        follow(second, config, kv, (content, *spaces))
