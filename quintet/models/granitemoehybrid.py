"""Granite 4 (IBM 2025): Mamba 2 and some attention, Granite's multipliers, experts beside a shared feed-forward."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.rope import Rotary
from quintet.layers.ssm.mamba import Mamba2
from quintet.models.bamba import spaces
from quintet.models.granite import GraniteDecoderLayer, GraniteForCausalLM

RENAMED = {
    ".mamba.": ".self_attn.",
    ".block_sparse_moe.router.layer.": ".mlp.moe.gate.",
    ".block_sparse_moe.input_linear.weight": ".mlp.moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".mlp.moe.experts.down_proj",
    ".block_sparse_moe.": ".mlp.moe.",
    ".shared_mlp.output_linear.": ".shared_mlp.down_proj.",
    ".shared_mlp.": ".mlp.shared.",
}


class GraniteMoeHybridMLP(nn.Module):
    """A gated feed-forward that serves every token and, where there are some, experts beside it."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        self._ops = build.ops.take("add")
        hidden, kind = config.hidden_size, config.hidden_act
        fused = CheckpointLayout(fused="input_linear")
        self.shared = GatedMLP(build, hidden, config.shared_intermediate_size, kind, stored=fused)
        mixture = (
            MoESizes(
                hidden=hidden,
                width=config.intermediate_size,
                experts=config.num_local_experts,
                top_k=config.num_experts_per_tok,
                activation=kind,
                renormalize=True,
            )
            if config.num_local_experts
            else None
        )
        self.moe = None if mixture is None else MoE(build, mixture)

    def forward(self, x: Tensor) -> Tensor:
        every = self.shared(x)
        out: Tensor = every if self.moe is None else self._ops.add(self.moe(x), every)
        return out


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """Granite with layers of Mamba 2 or attention, which may have no positions."""

    renamed_tensors = RENAMED
    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        CausalLM.__init__(self, build)
        rotary = Rotary.from_config(build, config) if config.position_embedding_type == "rope" else None

        def block(config: Any, build: BuildContext, index: int) -> GraniteDecoderLayer:
            mixer: nn.Module
            if config.layer_types[index] == "linear_attention":
                mixer = Mamba2(build, spaces(config))
            else:
                bias = config.attention_bias
                shape = AttentionSizes.from_config(
                    config, scale=config.attention_multiplier, bias=bias, output_bias=bias
                )
                mixer = SelfAttention(build, shape, rotary)
            return GraniteDecoderLayer(config, build, mixer, GraniteMoeHybridMLP(config, build))

        self.model = DecoderTrunk(config, build, block, scale=config.embedding_multiplier, scales_input_embeds=True)
        self.lm_head = LMHead.from_config(build, config)
        self._ops, self._factor = build.ops.take("scale"), 1 / config.logits_scaling
