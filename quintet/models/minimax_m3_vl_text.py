"""MiniMax-M3 (MiniMax 2026), the text model: each token sees blocks of keys that an indexer chooses in some layers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.attention.block_indexer import BlockIndexer, BlockIndexerSizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import DecoderTrunk, PreNormBlock
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import GATE, UP, MoE, MoESizes, unstacked
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.models.llama import LlamaForCausalLM
from quintet.models.minimax_m2 import MiniMaxM2ForCausalLM
from quintet.ops.activation import ClampedGate

INDEXER = r"model\.layers\.\d+\.self_attn\.indexer\..*"
GATE_UP = re.compile(r"(.+\.mlp(?:\.shared_experts)?)\.gate_up_proj\.weight")


class MiniMaxM3VLForCausalLM(MiniMaxM2ForCausalLM):
    """Pre-norm blocks, norms kept around 0 and of each head, clamped gates; experts behind the dense layers. Where no
    request is longer than the blocks that a token sees, attention is to all, and indexers are not read."""

    recordable = False  # torch computes gates, and tables of blocks' pages

    def __init__(self, config: Any, build: BuildContext) -> None:
        self._sparse = build.max_model_len > config.index_topk_blocks * config.index_block_size
        super().__init__(config, build)
        if not self._sparse:
            self.ignored_tensors = (*self.ignored_tensors, INDEXER)

    def _trunk(self, config: Any, build: BuildContext, block: Any) -> DecoderTrunk:
        return DecoderTrunk(config, build, block, norm=RMSNorm(build, config.hidden_size, config.rms_norm_eps, 1.0))

    def _block(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> nn.Module:
        return PreNormBlock(config, build, attention, mlp, norm_offset=1.0)

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        sparse = self._sparse and config.layer_types[index] == "minimax_m3_sparse"
        self._chosen = (config.index_topk_blocks, config.index_block_size) if sparse else (0, 0)
        attention = LlamaForCausalLM._attention(self, config, build, index, rotary)
        attention.q_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps, 1.0)
        attention.k_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps, 1.0)
        if sparse:
            assert rotary is not None
            heads = config.num_attention_heads, config.num_key_value_heads
            attention.indexer = BlockIndexer(build, indexer_sizes(config), heads, rotary)
        return attention

    def _attention_sizes(self, config: Any, index: int) -> AttentionSizes:
        chosen, block = self._chosen
        return AttentionSizes.from_config(config, chosen=chosen, chosen_block=block)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        gate = str(ClampedGate(config.swiglu_alpha, config.swiglu_limit, 1.0))
        if config.mlp_layer_types[index] == "dense":
            return GatedMLP(build, config.hidden_size, config.dense_intermediate_size, gate)
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.intermediate_size,
            experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            activation=gate,
            renormalize=True,
            scores="sigmoid",
            bias="gate.e_score_correction_bias",
            scale=config.routed_scaling_factor,
            shared=config.shared_intermediate_size,
        )
        return MoE(build, mixture)

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        """The experts' stacks and, in files that transformers writes, gate over up of the other feed-forwards."""
        found = GATE_UP.fullmatch(name)
        if found is None or len(shape) != 2 or shape[0] % 2:
            return unstacked(name, shape)
        half = shape[0] // 2
        return {f"{found[1]}.{GATE}.weight": (slice(0, half),), f"{found[1]}.{UP}.weight": (slice(half, shape[0]),)}

    @staticmethod
    def canonical(name: str) -> str:
        """MiniMax's own names: those of MiniMax-M2's experts, and an indexer's parts beside attention's."""
        name = MiniMaxM2ForCausalLM.canonical(name)
        name = name.replace(".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias")
        return re.sub(r"\.self_attn\.index_([qk]_(?:proj|norm))\.", r".self_attn.indexer.\1.", name)


def indexer_sizes(config: Any) -> BlockIndexerSizes:
    """The sizes of a layer's indexer."""
    return BlockIndexerSizes(
        hidden=config.hidden_size,
        heads=config.index_n_heads,
        head_dim=config.index_head_dim,
        block=config.index_block_size,
        count=config.index_topk_blocks,
        eps=config.rms_norm_eps,
        local=config.index_local_blocks,
    )
