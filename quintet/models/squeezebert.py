"""SqueezeBERT (Iandola et al. 2020), the trunk: BERT whose products are of groups of features."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quintet.layers.build import BuildContext
from quintet.layers.encoder import Encoder
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary
from quintet.layers.weight_transform import TransformedTensor
from quintet.models.bert import NAMES

EPS = 1e-12  # of the layers' norms


class SqueezeBertModel(Encoder):
    """Learned positions, and segments. Groups become whole products, with zeros outside them, as they are loaded."""

    prefixes = ("transformer.",)
    names = (
        ("encoder.layers.", "layers."),
        (".attention.query.", ".attention.q_proj."),
        (".attention.key.", ".attention.k_proj."),
        (".attention.value.", ".attention.v_proj."),
        (".post_attention.conv1d.", ".attention.o_proj."),
        (".post_attention.layernorm.", ".attention_norm."),
        (".intermediate.conv1d.", ".mlp.up_proj."),
        (".output.conv1d.", ".mlp.down_proj."),
        (".output.layernorm.", ".norm."),
        *NAMES,
    )

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        made = super().block(config, build, index, rotary)
        made.attention_norm, made.norm = (LayerNorm(build, config.hidden_size, EPS) for _ in range(2))
        self._inputs = {"down_proj": config.intermediate_size, "": config.hidden_size}
        return made

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Makes a matrix of each convolution over one token."""
        found = dict(entries)
        for name, entry in entries.items():
            if len(entry.shape) == 3 and entry.shape[2] == 1:
                width = self._inputs["down_proj" if ".down_proj." in name else ""]
                found[name] = TransformedTensor(entry, partial(_whole, width=width), (), (entry.shape[0], width))
        return found


def _whole(weight: Tensor, width: int) -> Tensor:
    """[outputs, width / groups, 1] -> [outputs, width]; each group's outputs read its own inputs."""
    groups = width // weight.shape[1]
    return torch.block_diag(*weight[:, :, 0].chunk(groups))
