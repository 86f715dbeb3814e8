"""HY V4 (Tencent 2026): GLM-5's attention with gates and sinks, and hyper-connections without mixing of streams."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quintet.layers.attention.indexer import IndexerSizes, TokenIndexer
from quintet.layers.attention.mla import LatentAttention, MLASizes
from quintet.layers.build import BuildContext, even_shards
from quintet.layers.decoder import BlockFactory, DecoderTrunk
from quintet.layers.hyper_connection import HyperBlock, HyperTrunk
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead, column_parallel
from quintet.layers.moe.moe import MoESizes
from quintet.layers.rope import Rotary
from quintet.models.deepseek_v3 import grouped
from quintet.models.deepseek_v32 import DeepseekV32ForCausalLM

RENAMED = {  # of Tencent's files -> of transformers' modules
    ".hc_pre.hc_": ".hc_",
    ".learnable_sink_param": ".sinks",
    ".linear_gate": ".gate_proj",
    **{f".hc_{theirs}_layer.hc_{name}": f".{ours}_hc.{name}"
       for theirs, ours in (("attn", "attn"), ("mlp", "ffn")) for name in ("fn", "base", "scale")},
    ".hc_head_": ".hc_",
}  # fmt: skip


class HYV4Attention(LatentAttention):
    """Each number of a head's output is gated by a product of the layer's input, and each head has a sink."""

    def __init__(
        self,
        build: BuildContext,
        shape: MLASizes,
        rotary: Rotary | None,
        chosen: int = 0,
        indexer: TokenIndexer | None = None,
    ) -> None:
        super().__init__(build, shape, rotary, chosen, indexer)
        gates = even_shards(shape.heads, build.size).times(shape.v_head_dim)
        self.gate = column_parallel(build, shape.hidden, {"gate_proj": gates})

    def queries(self, x: Tensor, first: Tensor, cache: StepState) -> tuple[Tensor, Tensor | None]:
        """The queries and the gates."""
        queries, _ = super().queries(x, first, cache)
        return queries, self.gate(x)


class HYV4ForCausalLM(DeepseekV32ForCausalLM):
    """Layers without an indexer see what the last one before chose; gates of the experts that are chosen are cut."""

    renamed_tensors = RENAMED
    latent_attention = HYV4Attention
    computed: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: Any, build: BuildContext) -> None:
        if config.swiglu_limit <= 0:
            raise ValueError(
                f"{config.model_type} with swiglu_limit={config.swiglu_limit} is not supported: gates of experts are "
                "cut at a number above 0; correct config.json"
            )
        super().__init__(config, build)
        self.ignored_tensors = (*self.ignored_tensors, r"model\.mtp_layers\..*")
        self.lm_head = LMHead.from_config(replace(build, dtype=torch.float32), config)
        self._widen = build.ops.take("widen").widen

    def head(self, x: Tensor) -> Tensor:
        """In float32, as the checkpoint has the head's weight."""
        return super().head(self._widen(x, x.shape[0], False))

    def _trunk(self, config: Any, build: BuildContext, block: BlockFactory) -> DecoderTrunk:
        return HyperTrunk(config, build, block)

    def _block(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> nn.Module:
        return HyperBlock(config, build, attention, mlp)

    def _latent_sizes(self, config: Any) -> MLASizes:
        return replace(super()._latent_sizes(config), sinks=True)

    def _indexer(self, config: Any, build: BuildContext, rotary: Rotary | None) -> TokenIndexer:
        sizes = IndexerSizes.from_config(config)
        return TokenIndexer(build, replace(sizes, eps=config.rms_norm_eps, turns_last=True, fp32_weights=True), rotary)

    @staticmethod
    def neighbours(config: Any) -> bool:
        return False

    @staticmethod
    def mixture(config: Any) -> MoESizes:
        return replace(grouped(config), limit=config.swiglu_limit)
