"""DeepSeek-V3 and R1, Kimi K2 (DeepSeek-AI 2024; Moonshot 2025): latent attention, experts chosen by sigmoid."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from quintet.layers.attention.mla import LatentAttention, MLASizes
from quintet.layers.build import BuildContext
from quintet.layers.decoder import require
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.rope import Rotary
from quintet.models.llama import LlamaForCausalLM


class DeepseekV3ForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks; the first have one feed-forward, the others experts and some that serve every token."""

    unstacked = staticmethod(unstacked)
    latent_attention: ClassVar[type[LatentAttention]] = LatentAttention
    # entries of DeepSeek's own code that transformers does not read -> what its classes compute
    computed: ClassVar[Mapping[str, Any]] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}

    def __init__(self, config: Any, build: BuildContext) -> None:
        self._check(config)
        super().__init__(config, build)
        self.ignored_tensors = (*LlamaForCausalLM.ignored_tensors, beyond(config))

    def _rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        return Rotary(
            build,
            config.qk_rope_head_dim,
            config.rope_parameters,
            config.max_position_embeddings,
            interleaved=self.neighbours(config),
        )

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        return self.latent_attention(build, self._latent_sizes(config), rotary)

    def _latent_sizes(self, config: Any) -> MLASizes:
        """Returns the sizes of a layer's attention."""
        return MLASizes.from_config(config)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        return super()._mlp(config, build, index) if dense(config, index) else MoE(build, self.mixture(config))

    def _check(self, config: Any) -> None:
        require(config, self.computed)

    @staticmethod
    def neighbours(config: Any) -> bool:
        """Returns whether rotary positions turn pairs of adjacent features (rope_interleave)."""
        return bool(config.rope_interleave)

    @staticmethod
    def mixture(config: Any) -> MoESizes:
        """The router as this family has it."""
        return grouped(config)


def dense(config: Any, index: int) -> bool:
    """Returns whether the layer has one feed-forward, and no experts."""
    kinds = getattr(config, "mlp_layer_types", None)
    return bool(index < config.first_k_dense_replace if kinds is None else kinds[index] == "dense")


def grouped(config: Any) -> MoESizes:
    """Grouped sigmoid routing with a bias for the choice of experts, under the names of DeepSeek's configs."""
    return MoESizes(
        hidden=config.hidden_size,
        width=config.moe_intermediate_size,
        experts=config.n_routed_experts if hasattr(config, "n_routed_experts") else config.num_experts,
        top_k=config.num_experts_per_tok,
        activation=config.hidden_act,
        renormalize=config.norm_topk_prob,
        scores="sigmoid",
        bias="gate.e_score_correction_bias",
        groups=config.n_group or 1,
        top_k_groups=config.topk_group or 1,
        scale=config.routed_scaling_factor,
        fp32_router=True,
        shared=config.moe_intermediate_size * (config.n_shared_experts or 0),
    )


def beyond(config: Any) -> str:
    """Layers past the last: they guess further tokens (multi-token prediction), and none here asks for them."""
    first, more = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 1
    return rf"model\.layers\.({'|'.join(str(first + i) for i in range(more))})\..*"
