"""nanochat (Karpathy 2025): norms that learn nothing, q and k turned backwards and then normalised, squared relu."""

from typing import Any

import torch
from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.blocks import NamedTrunk, SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.linear import LMHead
from quintet.layers.mlp import MLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary, head_dim
from quintet.models.hunyuan_v1_dense import Turned


class Backwards(Rotary):
    """Rotary positions that turn by the negative of each angle."""

    def constants(self) -> dict[str, Tensor]:
        cosines, sines = super().constants()["table"].chunk(2, dim=-1)
        return {"table": torch.cat([cosines, -sines], dim=-1)}


class NanoChatForCausalLM(CausalLM):
    """Pre-norm blocks behind a norm of the embedding, a plain feed-forward, soft-capped logits."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        hidden, biased = config.hidden_size, config.attention_bias
        rotary = Backwards.from_config(build, config)

        def norm(width: int) -> RMSNorm:
            return RMSNorm(build, width, config.rms_norm_eps, has_weight=False)

        def block() -> SerialBlock:
            attention = Turned(build, AttentionSizes.from_config(config, bias=biased, output_bias=biased), rotary)
            attention.q_norm, attention.k_norm = norm(head_dim(config)), norm(head_dim(config))
            parts = {
                "input_layernorm": norm(hidden),
                "self_attn": attention,
                "post_attention_layernorm": norm(hidden),
                "mlp": MLP(build, (hidden, config.intermediate_size), config.hidden_act, ("fc1", "fc2"), bias=False),
            }
            return SerialBlock(build, parts)

        parts = {
            "embed_tokens": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "embed_norm": norm(hidden),  # transformers applies `norm` twice
            "layers": nn.ModuleList(block() for _ in range(config.num_hidden_layers)),
            "norm": norm(hidden),
        }
        self.model = NamedTrunk(build, parts)
        self.lm_head = LMHead.from_config(build, config)
        self._ops, self._softcap = build.ops.take("softcap"), config.final_logit_softcapping

    def head(self, x: Tensor) -> Tensor:
        logits = super().head(x)
        return logits if self._softcap is None else self._ops.softcap(logits, self._softcap)
