"""Nomic's BERT (Nussbaum et al. 2024), the trunk: rotary positions, gated feed-forward, no biases; or experts."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.embedding import PositionEmbedding
from quintet.layers.encoder import (
    Encoder,
    PostNormEncoderBlock,
    encoder_attention_sizes,
    eps,
    gated_mlp,
    plain_mlp,
)
from quintet.layers.moe.moe import MoESizes
from quintet.layers.moe.ungated import BiasedUngatedMoE
from quintet.layers.rope import Rotary
from quintet.layers.weight_transform import TransformedTensor

STACK = re.compile(r"(.*\.mlp\.experts)\.mlp\.(w1|w2)")  # [experts * inner, hidden], of both products


class NomicBertModel(Encoder):
    """Segments; positions turn. With experts (Nomic Embed v2), in each so-many-th layer, products have biases."""

    prefixes = ("nomic_bert.", "bert.")
    names = (
        ("embeddings.word_embeddings.", "words."),
        ("embeddings.token_type_embeddings.", "types."),
        ("embeddings.LayerNorm.", "norm."),
        ("emb_ln.", "norm."),
        ("encoder.layers.", "layers."),
        ("self_attn.", "attention."),
        (".attn.out_proj.", ".attention.o_proj."),
        (".attn.Wqkv.", ".attention.qkv_proj."),
        ("mlp.fc11.", "mlp.up_proj."),
        ("mlp.fc12.", "mlp.gate_proj."),
        ("mlp.fc1.", "mlp.up_proj."),
        ("mlp.router.layer.", "mlp.gate."),
        ("mlp.fc2.", "mlp.down_proj."),
        ("post_attention_layernorm.", "attention_norm."),
        ("post_mlp_layernorm.", "norm."),
        (".norm1.", ".attention_norm."),
        (".norm2.", ".norm."),
    )

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self._experts = getattr(config, "num_experts", 0)

    def positions(self, config: Any, build: BuildContext, width: int) -> PositionEmbedding | None:
        return None

    def rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        return Rotary.from_config(build, config)

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        every = getattr(config, "moe_every_n_layers", 0)
        attention = SelfAttention(build, encoder_attention_sizes(config, bias=bool(every)), rotary)
        if not every:
            mlp: nn.Module = gated_mlp(config, build, config.hidden_act)
        elif index % every == 1:
            sizes = MoESizes(
                hidden=config.hidden_size,
                width=config.intermediate_size,
                experts=config.num_experts,
                top_k=config.moe_top_k,
                activation=config.hidden_act,
                renormalize=False,
            )
            mlp = BiasedUngatedMoE(build, sizes, config.has_experts_bias)
        else:
            mlp = plain_mlp(config, build)
        return PostNormEncoderBlock(build, attention, mlp, config.hidden_size, eps(config))

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Takes the experts' stacks apart: of the second product each is [in, out]."""
        found: dict[str, Any] = {}
        for name, entry in entries.items():
            stack = STACK.fullmatch(name)
            if stack is None:
                found[name] = entry
                continue
            projection, count = ("up_proj", "down_proj")[stack[2] == "w2"], self._experts
            if len(entry.shape) != 2 or not count or entry.shape[0] % count:
                raise ValueError(f"{name} is {list(entry.shape)}, not rows of {count} experts; fetch the model anew")
            inner, hidden = entry.shape[0] // count, entry.shape[1]
            shape = (hidden, inner) if projection == "down_proj" else (inner, hidden)
            for expert in range(count):
                take = partial(_expert_rows, expert=expert, count=count, turned=projection == "down_proj")
                found[f"{stack[1]}.{expert}.{projection}.weight"] = TransformedTensor(entry, take, new_shape=shape)
        return found


def _expert_rows(stack: Tensor, expert: int, count: int, turned: bool) -> Tensor:
    rows = stack.unflatten(0, (count, -1))[expert]
    return rows.t() if turned else rows
