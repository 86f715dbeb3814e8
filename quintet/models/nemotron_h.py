"""Nemotron-H and Nemotron 3 (NVIDIA 2025): layers of Mamba 2, attention without positions, or a feed-forward."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, refuse
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead
from quintet.layers.mlp import MLP
from quintet.layers.moe.moe import MoESizes, unstacked
from quintet.layers.moe.ungated import UngatedMoE
from quintet.layers.ssm.mamba import Mamba2, Mamba2Sizes
from quintet.layers.ssm.short_conv import check_silu
from quintet.models import mamba2

RENAMED = {**mamba2.RENAMED, "model.embeddings.": "model.embed_tokens.", "model.norm_f.": "model.norm."}


class NemotronHFeedForward(mamba2.Mamba2Block):
    """A norm and a feed-forward, or a mixture of experts."""

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        x, residual = self.norm(x, residual)
        return self.mixer(x), residual


class NemotronHForCausalLM(CausalLM):
    """One branch a layer. Time steps are time_step_min at least, as transformers has them."""

    unstacked = staticmethod(unstacked)
    renamed_tensors = RENAMED
    ignored_tensors = (*CausalLM.ignored_tensors, r"mtp\..*")

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        check_silu(config, "mamba_hidden_act")
        mamba2.say_rounded(config, build)
        refuse(config, "attention_bias", "sliding_window", *["tie_word_embeddings"] * build.ties_head(config))
        hidden, kind, bias = config.hidden_size, config.mlp_hidden_act, config.mlp_bias

        def block(config: Any, build: BuildContext, index: int) -> mamba2.Mamba2Block:
            mixer: nn.Module
            what = config.layers_block_type[index]
            if what == "linear_attention":
                return mamba2.Mamba2Block(config, build, Mamba2(build, spaces(config)))
            if what == "full_attention":
                return mamba2.Mamba2Block(config, build, SelfAttention(build, AttentionSizes.from_config(config), None))
            if what == "moe":
                mixer = UngatedMoE(build, mixture(config), config.moe_latent_size, bias)
            else:
                mixer = MLP(build, (hidden, config.intermediate_size), kind, ("up_proj", "down_proj"), bias)
            return NemotronHFeedForward(config, build, mixer)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)


def mixture(config: Any) -> MoESizes:
    """The router as DeepSeek-V3 has it."""
    return MoESizes(
        hidden=config.hidden_size,
        width=config.moe_intermediate_size,
        experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        activation=config.mlp_hidden_act,
        renormalize=config.norm_topk_prob,
        scores="sigmoid",
        bias="gate.e_score_correction_bias",
        groups=config.n_group,
        top_k_groups=config.topk_group,
        scale=config.routed_scaling_factor,
        shared=config.moe_shared_expert_intermediate_size,
    )


def spaces(config: Any) -> Mamba2Sizes:
    """The sizes of a state space."""
    return Mamba2Sizes(
        hidden=config.hidden_size,
        heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        groups=config.n_groups,
        state=config.ssm_state_size,
        conv_kernel=config.conv_kernel,
        eps=config.layer_norm_epsilon,
        conv_bias=config.use_conv_bias,
        bias=config.use_bias,
        output_bias=config.use_bias,
        dt_min=config.time_step_min,
    )
