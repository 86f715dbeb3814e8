"""A model that only adds up its tokens: learned in minutes, and then the beginning of the one with layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from transformers import BertModel

from .student import WIDTH

COMMON = 1e-3  # a token whose share of all is this begins with half of its weight
STILL = 4.0  # the constant number of each token, in lengths of a mean token: what is left of its length by LayerNorm


class Bag(torch.nn.Module):
    """words: [tokens, WIDTH - 1]. A token's length is its weight."""

    def __init__(self, meanings: torch.Tensor, ids: Iterable[Sequence[int]]) -> None:
        super().__init__()
        counts = Counter(token for each in ids for token in each)
        total = sum(counts.values())
        weights = torch.tensor([COMMON / (COMMON + counts[at] / total) for at in range(len(meanings))])
        self.words = torch.nn.EmbeddingBag.from_pretrained(
            meanings / meanings.std() * weights.unsqueeze(-1), freeze=False, mode="mean"
        )

    def forward(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """[texts, WIDTH - 1] of length 1; the first and the last token of each mean nothing."""
        inner = [row[1:-1] or row for row in rows]
        starts = torch.tensor([0, *map(len, inner)]).cumsum(0)[:-1]
        tokens = torch.tensor([token for row in inner for token in row])
        return torch.nn.functional.normalize(self.words(tokens, starts), dim=-1)


@torch.no_grad()
def give(bag: Bag, model: BertModel, ends: Sequence[int]) -> None:
    """Has BERT begin as the bag: its layers change nothing yet, and its norms keep the lengths of tokens.

    LayerNorm divides a token by its own length. With a constant that is longer than the rest behind the meaning, all
    are divided by nearly the same, and the last norm takes the constant away.
    """
    words = bag.words.weight.clone()
    words[list(ends)] = 0
    scale = words.pow(2).mean().sqrt()
    still = STILL * WIDTH**0.5
    table = model.embeddings.word_embeddings.weight
    table[:, :-1], table[:, -1] = words / scale, still
    model.embeddings.position_embeddings.weight.zero_()
    model.embeddings.token_type_embeddings.weight.zero_()
    mean, variance = still / WIDTH, still**2 / WIDTH * (1 - 1 / WIDTH) + 1  # of a token of mean length
    norms = [model.embeddings.LayerNorm]
    for layer in model.encoder.layer:
        norms += [layer.attention.output.LayerNorm, layer.output.LayerNorm]
        for product in (layer.attention.output.dense, layer.output.dense):
            product.weight.zero_()
        attention = layer.attention.self
        for product in (attention.query, attention.key, attention.value, layer.intermediate.dense):
            product.weight[:, -1] = 0
    for norm in norms:
        norm.weight.fill_(variance**0.5)
        norm.bias.fill_(mean)
    norms[-1].weight[-1] = norms[-1].bias[-1] = 0
