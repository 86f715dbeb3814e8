"""OLMo Hybrid (Ai2 2026): gated delta nets whose states may turn signs and, in some layers, OLMo 2's attention."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quintet.layers.build import BuildContext
from quintet.layers.decoder import PreNormBlock
from quintet.layers.rope import Rotary
from quintet.layers.ssm.delta_net import OLMO, DeltaNet
from quintet.layers.weight_transform import TransformedTensor
from quintet.models.olmo2 import Olmo2ForCausalLM
from quintet.models.qwen3_next import deltas

CONVS = tuple(f".{each}_conv1d.weight" for each in "qkv")
NORM_EPS = 1e-5  # of a delta net's heads, whatever config.json has


class OlmoHybridForCausalLM(Olmo2ForCausalLM):
    """Pre-norm blocks of delta nets, post-norm blocks of attention, without positions where no rope_theta is given."""

    renamed_tensors = {
        ".linear_attn.o_proj.": ".self_attn.out_proj.",
        ".linear_attn.o_norm.": ".self_attn.norm.",
        ".linear_attn.": ".self_attn.",
        ".attention_layer_norm.": ".input_layernorm.",
        ".feedforward_layer_norm.": ".post_attention_layernorm.",
    }

    def _block(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        if config.layer_types[index] == "full_attention":
            return super()._block(config, build, index)
        scale = 2.0 if config.linear_allow_neg_eigval else 1.0
        sizes = dataclasses.replace(deltas(config), eps=NORM_EPS, beta_scale=scale)
        return PreNormBlock(config, build, DeltaNet(build, sizes, OLMO), self._feed(config, build))

    def _attending(self, config: Any, build: BuildContext) -> Any:
        turns = config.rope_parameters and config.rope_parameters.get("rope_theta") is not None
        rotary = Rotary.from_config(build, config) if turns else None
        return lambda index: (None, rotary)

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Joins a layer's convolutions: published files cut them by q, k and v, those of transformers in thirds."""
        found = {name: entry for name, entry in entries.items() if not name.endswith(CONVS)}
        for stem in (name.removesuffix(CONVS[0]) for name in entries if name.endswith(CONVS[0])):
            parts = [entries[stem + each] for each in CONVS if stem + each in entries]
            if len(parts) != len(CONVS):
                raise ValueError(f"{stem} lacks one of {', '.join(CONVS)}; fetch the model anew")
            shape = (sum(each.shape[0] for each in parts), *parts[0].shape[1:])
            found[f"{stem}.conv1d.weight"] = TransformedTensor(parts[0], _joined, tuple(parts[1:]), shape)
        return found


def _joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts)
