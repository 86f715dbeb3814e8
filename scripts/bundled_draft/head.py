"""The head in training: EAGLE's formulas, with the chain of drafts unrolled as it runs when it proposes.

Slot t of a text takes the token at t + 1 and a hidden state for t, and gives the distribution of the token at t + 2 and
a hidden state for t + 1. The first draft of a chain has the model's hidden state; each further one has the head's own
of the draft before, and its attention reads the model's slots up to there and the chain's after them.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from bundled.training import MicroBatch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

WIDTH = 192  # of the feed-forward part: the file has less than a megabyte
DRAFTS = 3  # of a chain in training
HIDDEN_WEIGHT = 0.2  # of the distance to the model's hidden states, beside the drafts' cross-entropy


class TrainedHead(nn.Module):
    """Its parameters have the names of EAGLE's files; the chat model that it learns from is fixed."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        self._target = (target.eval().requires_grad_(False),)  # a tuple: no part of the head
        self.config = copy.deepcopy(target.config)
        self.config.num_hidden_layers, self.config.intermediate_size = 1, WIDTH
        size = target.config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        layer = LlamaDecoderLayer(self.config, 0)
        layer.input_layernorm = nn.Identity()
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
        self.layers = nn.ModuleList([layer])

    @property
    def target(self) -> LlamaForCausalLM:
        return self._target[0]

    def step(self, embeds: Tensor, states: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """One draft of the chains that begin at each slot [B, T, H]; appends its keys and values -> hidden states."""
        (layer,) = self.layers
        x = self.fc(torch.cat([embeds, states], -1))
        x = x + layer.self_attn.o_proj(self._attend(layer.self_attn, x, keys, values))
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def _attend(self, attention: nn.Module, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        count, groups = x.shape[1], attention.num_key_value_groups
        parts = (attention.q_proj(x), attention.k_proj(x), attention.v_proj(x))
        q, k, v = (part.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for part in parts)
        cos, sin = self.target.model.rotary_emb(x, torch.arange(count)[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        keys.append(k.repeat_interleave(groups, 1))
        values.append(v.repeat_interleave(groups, 1))
        last = len(keys) - 1
        seen = torch.ones(count, count, dtype=torch.bool).tril(-last)
        scores = [(q @ keys[0].mT).masked_fill(~seen, float("-inf"))]
        scores += [(q * later(keys[at], last - at)).sum(-1, keepdim=True) for at in range(1, last + 1)]
        shares = (torch.cat(scores, -1) * attention.scaling).softmax(-1)
        out = shares[..., :count] @ values[0]
        for at in range(1, last + 1):
            out = out + shares[..., count + at - 1, None] * later(values[at], last - at)
        return out.transpose(1, 2).flatten(2)


def later(x: Tensor, slots: int) -> Tensor:
    """[.., T, D] with each row that many slots later, and zeros before."""
    return F.pad(x, (0, 0, slots, 0))[..., : x.shape[-2], :]


def draft_loss(head: TrainedHead, batch: MicroBatch) -> Tensor:
    """Mean over the drafts of a chain: cross-entropy with the chat model, and the error of hidden states."""
    target = head.target
    with torch.no_grad():
        hidden = target.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        embeds = target.model.embed_tokens(batch.input_ids)[:, 1:]
    states, wanted, keys, values = hidden[:, :-1], hidden[:, 1:], list[Tensor](), list[Tensor]()
    learnt, losses = batch.labels[:, 1:] != -100, []
    for _ in range(DRAFTS):
        out = head.step(embeds, states, keys, values)
        with torch.no_grad():
            shares = target.lm_head(wanted[learnt]).float().softmax(-1)
        logits = target.lm_head(out[learnt]).float()
        losses.append(F.cross_entropy(logits, shares) + HIDDEN_WEIGHT * F.smooth_l1_loss(out[learnt], wanted[learnt]))
        states = later(out, 1)
        learnt = learnt.clone()
        learnt[:, len(losses) - 1] = False  # a chain that begins before the text
    return torch.stack(losses).mean()


@torch.no_grad()
def accepted(head: TrainedHead, batch: MicroBatch) -> list[tuple[int, int]]:
    """(drafts that are the chat model's greedy token, all drafts) for each place of a chain whose earlier drafts were
    right, over texts as they are."""
    target = head.target
    hidden = target.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    embeds = target.model.embed_tokens(batch.input_ids)[:, 1:]
    best = target.lm_head(hidden[:, 1:]).argmax(-1)
    states, keys, values = hidden[:, :-1], list[Tensor](), list[Tensor]()
    alive, counts = batch.labels[:, 1:] != -100, []
    for place in range(DRAFTS):
        alive = alive.clone()
        alive[:, :place] = False
        out = head.step(embeds, states, keys, values)
        right = target.lm_head(out).argmax(-1) == best
        counts.append((int((right & alive).sum()), int(alive.sum())))
        states, alive = later(out, 1), F.pad(right & alive, (1, 0))[:, :-1] & (batch.labels[:, 1:] != -100)
    return counts
