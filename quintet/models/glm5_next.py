"""GLM-5-Next's text model (Z.ai 2026): Kimi Delta Attention, sparse attention to pools of tokens, hyper-connections."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from quintet.layers.attention.indexer import IndexerSizes, PoolIndexer, TokenIndexer
from quintet.layers.attention.mla import MLASizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import BlockFactory, DecoderTrunk, require
from quintet.layers.hyper_connection import HyperBlock, HyperTrunk, MeanHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import MoE, MoESizes
from quintet.layers.rope import Rotary
from quintet.layers.ssm.kimi_delta import KimiDeltaAttention, KimiDeltaSizes
from quintet.layers.ssm.short_conv import check_silu
from quintet.models.deepseek_v3 import dense, grouped
from quintet.models.deepseek_v32 import DeepseekV32ForCausalLM
from quintet.models.kimi_linear import KimiLinearForCausalLM
from quintet.ops.activation import with_limit

RENAMED = {
    f".hc_{branch}_{name}": f".{branch}_hc.{name}" for branch in ("attn", "ffn") for name in ("fn", "base", "scale")
}
GATE = ".index_kpool_compress_gate"


class Glm5NextForCausalLM(DeepseekV32ForCausalLM):
    """Most layers have a state; the others have latent attention without positions, and see pools that an indexer
    chooses. Gates of all feed-forwards are cut."""

    computed: ClassVar[Mapping[str, Any]] = {"index_kpool_always_select_tail": True}

    def __init__(self, config: Any, build: BuildContext) -> None:
        require(config, self.computed)
        check_silu(config)
        super().__init__(config, build)
        self.ignored_tensors = (*self.ignored_tensors, r"model\.layers\.\d+\.shared_head\..*")

    def _trunk(self, config: Any, build: BuildContext, block: BlockFactory) -> DecoderTrunk:
        return HyperTrunk(config, build, block, MeanHead)

    def _block(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> nn.Module:
        return HyperBlock(config, build, attention, mlp)

    def _rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        return None

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        if config.layer_types[index] != "linear_attention":
            return super()._attention(config, build, index, rotary)
        sizes = KimiDeltaSizes(
            hidden=config.hidden_size,
            heads=config.linear_num_heads,
            head_dim=config.linear_head_dim,
            conv_kernel=config.linear_conv_kernel_dim,
            eps=config.rms_norm_eps,
            lower_bound=config.linear_lower_bound or 0.0,
        )
        return KimiDeltaAttention(build, sizes)

    def _indexer(self, config: Any, build: BuildContext, rotary: Rotary | None) -> TokenIndexer:
        return PoolIndexer(build, replace(IndexerSizes.from_config(config), pool=config.index_kpool), None)

    def _latent_sizes(self, config: Any) -> MLASizes:
        return replace(super()._latent_sizes(config), eps=config.rms_norm_eps)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        if not dense(config, index):
            return MoE(build, self.mixture(config))
        kind = with_limit(config.hidden_act, config.swiglu_limit)
        return GatedMLP(build, config.hidden_size, config.intermediate_size, kind)

    @staticmethod
    def visible_tokens(config: Any) -> int:
        """Those of pools, and all behind the last one."""
        count: int = config.index_topk + config.index_kpool - 1
        return count

    @staticmethod
    def _indexers(config: Any) -> list[str]:
        pairs = zip(config.layer_types, config.indexer_types, strict=True)
        return ["" if kind == "linear_attention" else indexer for kind, indexer in pairs]

    @staticmethod
    def mixture(config: Any) -> MoESizes:
        return replace(grouped(config), activation=with_limit(config.hidden_act, config.swiglu_limit))

    @classmethod
    def canonical(cls, name: str) -> str:
        """Published files name connections otherwise; transformers has a module for what forgets."""
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours, 1)
        name = name.replace(".forget_gate.", ".", 1)
        return f"{name}.weight" if name.endswith(GATE) else name

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        """As Kimi Linear's."""
        return KimiLinearForCausalLM.unstacked(name, shape)
