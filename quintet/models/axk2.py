"""A.X K2 (SK Telecom 2026): DeepSeek-V3.2 with gates of norms, and of what attention gives."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.indexer import TokenIndexer
from quintet.layers.attention.mla import LatentAttention, MLASizes
from quintet.layers.build import BuildContext, replicated
from quintet.layers.layer_state import StepState
from quintet.layers.linear import SectionedLinear, column_parallel
from quintet.layers.moe.moe import MoE
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.layers.ssm.delta_net import sections_by_head
from quintet.models.deepseek_v32 import DeepseekV32ForCausalLM

RENAMED = {  # of transformers' modules -> of published files
    ".q_gate_proj.": ".q_b_proj.",
    "layernorm.mlp.fc1.": "layernorm.W_down.",
    "layernorm.mlp.fc2.": "layernorm.W_up.",
}


class GatedRMSNorm(nn.Module):
    """A norm, times the sigmoid of a gate that two products make of it."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        hidden, rank = config.hidden_size, config.gated_norm_rank
        self.norm = RMSNorm(build, hidden, config.rms_norm_eps)
        self.down = column_parallel(build, hidden, {"W_down": replicated(rank, build.size)})
        self.up = column_parallel(build, rank, {"W_up": replicated(hidden, build.size)})
        self._ops = build.ops.take("activate", "sigmoid_gate")

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x, residual = self.norm(x, residual)
        return self._ops.sigmoid_gate(x, self.up(self._ops.activate(self.down(x), "silu"))), residual


class AXK2Attention(LatentAttention):
    """One product makes each head's query and the gate of its output of the latent, normalised and as it is."""

    def __init__(
        self,
        build: BuildContext,
        shape: MLASizes,
        rotary: Rotary | None,
        chosen: int = 0,
        indexer: TokenIndexer | None = None,
    ) -> None:
        super().__init__(build, shape, rotary, chosen, indexer)
        if shape.heads % build.size:
            raise ValueError(
                f"{build.size} ranks cannot share {shape.heads} heads with gates; choose a tensor_parallel_size that "
                "divides them"
            )
        assert shape.q_lora_rank is not None, "transformers' config has no other"
        self._widths = [shape.qk_nope_head_dim + shape.qk_rope_head_dim, shape.v_head_dim]
        sections = sections_by_head("q_b_proj", shape.heads, self._widths, build.size)
        self.q = SectionedLinear(build, 2 * shape.q_lora_rank, sections)

    def queries(self, x: Tensor, first: Tensor, cache: StepState) -> tuple[Tensor, Tensor | None]:
        """The queries and the gates."""
        assert self.q is not None and self.q_a_layernorm is not None
        latent = self.q_a_layernorm(first)
        if self.indexer is not None:
            cache.chosen = self.indexer(x, latent, cache)
        made = self.q(self._ops.beside(latent, first))
        queries, gates = made.split([self._heads * each for each in self._widths], dim=-1)
        return queries, gates


class AXK2ForCausalLM(DeepseekV32ForCausalLM):
    """The norm before a feed-forward without experts has no gate."""

    renamed_tensors = RENAMED
    latent_attention = AXK2Attention

    def _block(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> nn.Module:
        block = super()._block(config, build, attention, mlp)
        block.input_layernorm = GatedRMSNorm(config, build)
        if isinstance(mlp, MoE):
            block.post_attention_layernorm = GatedRMSNorm(config, build)
        return block
