"""StarCoder 2 (Lozhkov et al. 2024): LayerNorm, biases, a plain feed-forward, windows where trained so."""

from functools import partial
from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk
from quintet.layers.linear import LMHead
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary


class Starcoder2ForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions, a head that is tied as a rule."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        hidden, bias = config.hidden_size, config.use_bias
        norm = partial(LayerNorm, build, hidden, config.norm_epsilon)
        rotary = Rotary.from_config(build, config)

        def block(config: Any, build: BuildContext, index: int) -> SerialBlock:
            shape = AttentionSizes.from_config(config, bias=bias, output_bias=bias, window=config.sliding_window)
            sizes = hidden, config.intermediate_size
            parts = {
                "input_layernorm": norm(),
                "self_attn": SelfAttention(build, shape, rotary),
                "post_attention_layernorm": norm(),
                "mlp": MLP(build, sizes, config.hidden_act, ("c_fc", "c_proj"), bias),
            }
            return SerialBlock(build, parts)

        self.model = DecoderTrunk(config, build, block, norm=norm())
        self.lm_head = LMHead.from_config(build, config)
