"""Hunyuan-A13B (Tencent 2025): Hunyuan's attention, and experts of which one serves every token."""

from typing import Any

from torch import nn

from quintet.layers.build import BuildContext
from quintet.layers.decoder import refuse, require
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.models import hunyuan_v1_dense

RENAMED = {
    **hunyuan_v1_dense.RENAMED,
    ".mlp.gate.wg.": ".mlp.gate.",
    ".mlp.shared_mlp.": ".mlp.shared_experts.",
}

# entries of Tencent's code that transformers does not read -> what its classes compute
COMPUTED = {"norm_topk_prob": True, "use_qk_norm": True, "use_mixed_mlp_moe": True}


class HunYuanMoEV1ForCausalLM(hunyuan_v1_dense.HunYuanDenseV1ForCausalLM):
    """The same blocks."""

    renamed_tensors = RENAMED
    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        refuse(config, "use_cla")  # layers that read another's keys and values
        refuse(config, "use_mla", "group_limited_greedy", "moe_layer_num_skipped")
        require(config, COMPUTED)
        for name, value in {"moe_intermediate_size": config.intermediate_size, "num_shared_expert": 1}.items():
            configured = getattr(config, name, None)
            if isinstance(configured, list) and any(each != value for each in configured):
                raise ValueError(
                    f"{config.model_type} with {name}={configured} is not supported; {value} is in every layer"
                )
            if not isinstance(configured, list):
                require(config, {name: value})
        super().__init__(config, build)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        chosen = config.moe_topk if isinstance(config.moe_topk, int) else config.moe_topk[index]
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.intermediate_size,
            experts=config.num_experts,
            top_k=chosen,
            activation=config.hidden_act,
            renormalize=True,
            shared=config.intermediate_size,
            fp32_router=True,
        )
        return MoE(build, mixture)
