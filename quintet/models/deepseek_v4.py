"""DeepSeek-V4 (DeepSeek-AI 2026): compressed entries beside a window, several streams, experts chosen by token ids."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.compressed import SLIDING, CompressedAttention, CompressedSizes, LastRotary
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, require
from quintet.layers.hyper_connection import HyperBlock, HyperTrunk
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead
from quintet.layers.moe.hashed import HashedMoE
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.ops.activation import with_limit

RENAMED = {  # of published files -> of transformers' modules, one after the other
    ".attn.": ".self_attn.",
    ".ffn.": ".mlp.",
    ".attn_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".hc_attn_": ".attn_hc.",
    ".hc_ffn_": ".ffn_hc.",
    "hc_head_": "hc_head.hc_",
    ".attn_sink": ".sinks",
    ".indexer.compressor.": ".compressor.indexer.",
    ".indexer.weights_proj.": ".compressor.indexer.scorer.weights_proj.",
    ".indexer.wq_b.": ".compressor.indexer.q_b_proj.",
    "or.norm.": "or.kv_norm.",  # a compressor's
    "indexer.norm.": "indexer.kv_norm.",
    ".self_attn.norm.": ".self_attn.kv_norm.",  # as transformers writes it
    ".ape": ".position_bias",
    ".wq_a.": ".q_a_proj.",
    ".wq_b.": ".q_b_proj.",
    ".wkv.": ".kv_proj.",
    ".wgate.": ".gate_proj.",
    ".wo_a.": ".o_a_proj.",
    ".wo_b.": ".o_b_proj.",
    ".q_norm.": ".q_a_norm.",
    ".gate.bias": ".gate.e_score_correction_bias",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}
TOP = {"embed.": "model.embed_tokens.", "head.": "lm_head."}


class DeepseekV4Block(HyperBlock):
    """A block whose experts are chosen by a router or by the tokens."""

    def feed(self, x: Tensor, cache: StepState) -> Tensor:
        out: Tensor = self.mlp(x, cache.batch.token_ids) if isinstance(self.mlp, HashedMoE) else self.mlp(x)
        return out


class DeepseekV4ForCausalLM(CausalLM):
    """Layers see a window alone, entries of many tokens, or those of a few that an indexer chooses."""

    renamed_tensors = RENAMED
    unstacked = staticmethod(unstacked)
    recordable = False  # its ops are torch's

    def __init__(self, config: Any, build: BuildContext) -> None:
        require(config, {"scoring_func": "sqrtsoftplus", "attention_bias": False, "mlp_bias": False})
        super().__init__(build)
        self.ignored_tensors = (*CausalLM.ignored_tensors, r"(.*\.)?mtp\..*")
        rotary = {kind: LastRotary(build, config, kind) for kind in ("main", "compress")}

        def block(config: Any, build: BuildContext, index: int) -> nn.Module:
            sizes = CompressedSizes.from_config(config, index)
            turn = rotary["main" if config.layer_types[index] == SLIDING else "compress"]
            attention = CompressedAttention(build, sizes, turn)
            return DeepseekV4Block(config, build, attention, self._mlp(config, build, index))

        self.model = HyperTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)

    @classmethod
    def canonical(cls, name: str) -> str:
        """Published files have no "model." before names, and scales of blocks of a weight in `scale`."""
        name = super().canonical(name)
        for theirs, ours in TOP.items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        if name.endswith(".scale") and not name.endswith("_hc.scale"):
            name = name.removesuffix("scale") + "weight_scale_inv"
        return f"model.{name}" if name.startswith(("layers.", "norm.", "hc_head.")) else name

    @staticmethod
    def _mlp(config: Any, build: BuildContext, index: int) -> nn.Module:
        hashed = config.mlp_layer_types[index] == "hash_moe"
        if hashed and build.row_store is not None:
            raise ValueError(
                f"{config.model_type} takes no prompt embeddings: the ids of tokens choose the experts of its first "
                "layers; leave enable_prompt_embeds out"
            )
        sizes = MoESizes(
            hidden=config.hidden_size,
            width=config.moe_intermediate_size,
            experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            activation=with_limit(config.hidden_act, config.swiglu_limit),
            renormalize=True,
            scores="sqrtsoftplus",
            bias=None if hashed else "gate.e_score_correction_bias",
            scale=config.routed_scaling_factor,
            fp32_router=True,
            shared=config.moe_intermediate_size,
        )
        return HashedMoE(build, sizes, config.vocab_size) if hashed else MoE(build, sizes)
