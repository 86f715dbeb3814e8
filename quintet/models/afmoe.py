"""Trinity (Arcee 2025): gated attention with positions in windows alone, norms around each branch, experts."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import BetweenNormsBlock
from quintet.layers.build import BuildContext, split_heads
from quintet.layers.decoder import CausalLM, DecoderTrunk, layer_window, require
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead, column_parallel
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary, head_dim

# the router stands beside the experts
RENAMED = {".mlp.router.gate.": ".mlp.gate."}

# entries of Arcee's code that transformers does not read -> what its classes compute
COMPUTED = {"score_func": "sigmoid", "route_norm": True, **dict.fromkeys(("n_group", "num_expert_groups"), 1)}


class AfmoeAttention(SelfAttention):
    """Attention with an output gate: its output is multiplied by the sigmoid of another product of its input."""

    def __init__(self, build: BuildContext, shape: AttentionSizes, rotary: Rotary | None) -> None:
        super().__init__(build, shape, rotary)
        queries, _ = split_heads(shape.heads, shape.kv_heads, build.size)
        self.gate = column_parallel(build, shape.hidden, {"gate_proj": queries.times(shape.head_dim)})
        self._ops = build.ops.take("sigmoid_gate")

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        out: Tensor = self.out(self._ops.sigmoid_gate(self._project_and_mix(x, cache), self.gate(x)))
        return out


class AfmoeForCausalLM(CausalLM):
    """QK-norm; the first layers have one feed-forward, the others experts and some that serve every token."""

    renamed_tensors = RENAMED
    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        require(config, COMPUTED)
        hidden, eps, biased = config.hidden_size, config.rms_norm_eps, config.attention_bias
        rotary, norm = Rotary.from_config(build, config), partial(RMSNorm, build, hidden, eps)
        mixture = MoESizes(
            hidden=hidden,
            width=config.moe_intermediate_size,
            experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=True,
            scores="sigmoid",
            bias="expert_bias",
            scale=config.route_scale,
            shared=config.moe_intermediate_size * config.num_shared_experts,
        )

        def attention(index: int) -> AfmoeAttention:
            window = layer_window(config, index)
            shape = AttentionSizes.from_config(config, window=window, bias=biased, output_bias=biased)
            made = AfmoeAttention(build, shape, None if window is None else rotary)
            made.q_norm = RMSNorm(build, head_dim(config), eps)
            made.k_norm = RMSNorm(build, head_dim(config), eps)
            return made

        def block(config: Any, build: BuildContext, index: int) -> BetweenNormsBlock:
            mlp: nn.Module
            if index < config.num_dense_layers:
                mlp = GatedMLP(build, hidden, config.intermediate_size, config.hidden_act)
            else:
                mlp = MoE(build, mixture)
            parts = {
                "input_layernorm": norm(),
                "self_attn": attention(index),
                "post_attention_layernorm": norm(),
                "pre_mlp_layernorm": norm(),
                "mlp": mlp,
                "post_mlp_layernorm": norm(),
            }
            return BetweenNormsBlock(build, parts)

        scale = hidden**0.5 if config.mup_enabled else 1.0
        self.model = DecoderTrunk(config, build, block, scale, scales_input_embeds=True)
        self.lm_head = LMHead.from_config(build, config)
