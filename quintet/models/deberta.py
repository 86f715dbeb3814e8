"""DeBERTa (He et al. 2021), the trunk: BERT with disentangled attention, a vector for each distance."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.attention.disentangled import disentangled_scale
from quintet.layers.encoder import encoder_attention_sizes
from quintet.layers.linear import CheckpointLayout
from quintet.layers.weight_transform import TransformedTensor
from quintet.models import deberta_v2
from quintet.models.bert import NAMES


class DebertaModel(deberta_v2.DebertaV2Model):
    """Queries, keys and values in one product, head by head; keys have no bias."""

    names = (
        ("attention.self.pos_proj.", "attention.pos_key_proj."),
        ("attention.self.pos_q_proj.", "attention.pos_query_proj."),
        ("attention.self.", "attention."),
        *NAMES,
    )

    def attention_sizes(self, config: Any) -> AttentionSizes:
        heads = config.num_attention_heads
        return encoder_attention_sizes(
            config,
            scale=disentangled_scale(config.hidden_size // heads, 1 + len(config.pos_att_type or ())),
            stored=CheckpointLayout(fused="in_proj", num_strips=heads),
        )

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Puts the biases of queries and values beside zeros for keys, as the product has them."""
        found = dict(super().gathered(entries))
        for name in [name for name in found if name.endswith(".q_bias")]:
            path = name.removesuffix(".q_bias")
            queries, values = found.pop(name), found.pop(f"{path}.v_bias", None)
            if values is None:
                raise ValueError(f"the files lack {path}.v_bias; fetch the model anew")
            join = partial(_joined, heads=self._heads)
            found[f"{path}.in_proj.bias"] = TransformedTensor(queries, join, (values,), (3 * queries.shape[0],))
        return found


def _joined(queries: Tensor, values: Tensor, heads: int) -> Tensor:
    """Biases [H * D] of queries and of values -> [H * 3 * D], head by head."""
    parts = queries.view(heads, -1), torch.zeros_like(queries).view(heads, -1), values.view(heads, -1)
    return torch.cat(parts, 1).flatten()
