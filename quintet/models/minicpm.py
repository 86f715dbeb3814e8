"""MiniCPM 1, 2 and 4 (Hu et al. 2024): Granite's multipliers; in MiniCPM-MoE, experts by softmax."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from quintet.layers.build import BuildContext
from quintet.layers.moe.moe import MoE, MoESizes
from quintet.models.granite import GraniteForCausalLM
from quintet.models.mixtral import MixtralForCausalLM

DENSE_LENGTH = 8192  # tokens, where sparse_config names no dense_len


class MiniCPMForCausalLM(GraniteForCausalLM):
    """Attention to all tokens: blocks that an indexer chooses, in MiniCPM 4.1's longer texts, are not computed."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        _refuse_sparse(config, build)
        super().__init__(config, build)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        experts = getattr(config, "num_experts", 0)
        if not experts:
            return super()._mlp(config, build, index)
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.intermediate_size,
            experts=experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=True,
        )
        return MoE(build, mixture)

    @staticmethod
    def canonical(name: str) -> str:
        """An expert's projections are called w1, w2 and w3."""
        return MixtralForCausalLM.canonical(name)


def _refuse_sparse(config: Any, build: BuildContext) -> None:
    """ValueError where requests may be longer than those in which every token sees all before it (InfLLM v2)."""
    sparse = getattr(config, "sparse_config", None)
    if not sparse:
        return
    dense = sparse.get("dense_len", DENSE_LENGTH) if isinstance(sparse, Mapping) else None
    if type(dense) is not int:
        raise ValueError(f"minicpm's sparse_config is {sparse!r}, not an object with a whole number dense_len")
    if build.max_model_len > dense:
        raise ValueError(
            f"minicpm with sparse_config chooses blocks of keys in requests of more than {dense} tokens, which is not "
            f"computed here; set max_model_len to {dense} or less, or attend to all tokens with "
            'hf_overrides={"sparse_config": null}'
        )
