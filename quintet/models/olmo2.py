"""OLMo 2 (Walsh et al. 2024): norms after the branches, and q and k normalised over all heads together."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention import Heads, SelfAttention
from quintet.layers.build import Build, split_heads
from quintet.layers.decoder import CausalLM, Decoder, head_source
from quintet.layers.linear import LMHead
from quintet.layers.mixing import Cache
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm, ShardedRMSNorm
from quintet.layers.rope import Rotary, head_dim


class Block(nn.Module):
    """Each branch reads the plain residual and is normalised before it joins it."""

    def __init__(self, config: Any, build: Build, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self._ops = build.ops.take("add")
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(build, config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, residual: Tensor | None, cache: Cache) -> tuple[Tensor, Tensor]:
        x = x if residual is None else self._ops.add(x, residual)
        x = self._ops.add(self.post_attention_layernorm(self.self_attn(x, cache)), x)
        return self.post_feedforward_layernorm(self.mlp(x)), x


class Model(CausalLM):
    """Post-norm blocks, QK-norm over the whole projection, rotary positions, a gated feed-forward."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(build)
        rotary = Rotary.of(build, config)
        queries, keys = split_heads(config.num_attention_heads, config.num_key_value_heads, build.size)

        def block(config: Any, build: Build, index: int) -> Block:
            shape = Heads.of(
                config,
                bias=config.attention_bias,
                output_bias=config.attention_bias,
            )
            attention = SelfAttention(build, shape, rotary)
            attention.q_norm = ShardedRMSNorm(build, queries.times(head_dim(config)), config.rms_norm_eps)
            attention.k_norm = ShardedRMSNorm(build, keys.times(head_dim(config)), config.rms_norm_eps)
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)
            return Block(config, build, attention, mlp)

        self.model = Decoder(config, build, block)
        self.lm_head = LMHead(build, config.hidden_size, config.vocab_size, head_source(config))
