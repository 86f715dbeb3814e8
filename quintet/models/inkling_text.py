"""Inkling (Thinking Machines 2026): numbers of queries for distances, short convolutions in each layer, experts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.weights import Weight
from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.attention.distances import DistanceBiasAttention, LogScaling, ResidualConv
from quintet.layers.blocks import NamedTrunk
from quintet.layers.build import BuildContext, replicated, vector_weight
from quintet.layers.decoder import CausalLM
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe import moe
from quintet.layers.norm import RMSNorm
from quintet.layers.weight_transform import TransformedTensor

ALWAYS = 1e4  # added to the scores of shared experts, which are 1 at most: every token chooses them
NAMES = (  # of published checkpoints, and of transformers' classes -> the modules'
    (r"\.unembed\.", ".lm_head."),
    (r"^model\.lm_head\.", "lm_head."),
    (r"^model\.embed\.", "model.embed_tokens."),
    (r"embed_tokens\.embed_norm\.", "embed_norm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.w([qkv])_d[uv]\.", r".\1_proj."),
    (r"\.wr_du\.", ".r_proj."),
    (r"\.wo_ud\.", ".o_proj."),
    (r"\.rel_logits_proj\.proj$", ".rel_logits_proj.weight"),
    (r"sconv\.conv1d\.", "sconv."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.w2_md\.", ".mlp.down_proj."),
    (r"\.mlp\.experts\.w2_weight$", ".mlp.experts.down_proj"),
    (r"\.shared_experts\.shared_w2_weight$", ".shared_experts.down_proj"),
)
INTERLEAVED = re.compile(r"(.+\.mlp)\.(w13_dn\.weight|experts\.w13_weight|shared_experts\.shared_w13_weight)")
SHARED = re.compile(r"(.+\.mlp)\.shared_experts\.(gate_proj|up_proj|down_proj)")


class InklingRouter(moe.ExpertRouter):
    """Weights are multiplied by a number that the layer learned."""

    def __init__(self, build: BuildContext, moe_sizes: moe.MoESizes) -> None:
        super().__init__(build, moe_sizes)
        self._factor_ops = build.ops.take("scale_heads")
        self.factor: Tensor

    def weights(self, path: str) -> list[Weight]:
        source = f"{path.rpartition('.')[0]}.gate.global_scale"
        return [*super().weights(path), vector_weight(self._build, source, 1, torch.float32, name="factor")]

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = super().choose(logits)
        return self._factor_ops.scale_heads(weights[:, None], self.factor[:, None])[:, 0], ids


class InklingMoE(moe.MoE):
    """Shared experts are experts that every token chooses: their weights and those of the others add up to 1."""

    def expert_router(self, build: BuildContext, moe_sizes: moe.MoESizes) -> moe.ExpertRouter:
        return InklingRouter(build, moe_sizes)


class InklingDecoderLayer(nn.Module):
    """Norm, attention, convolution; norm, feed-forward, convolution."""

    def __init__(self, config: Any, build: BuildContext, index: int, scaling: LogScaling | None) -> None:
        super().__init__()
        hidden, eps, taps = config.hidden_size, config.rms_norm_eps, config.conv_kernel_size
        self.input_layernorm = RMSNorm(build, hidden, eps)
        self.self_attn = _attention(config, build, index, scaling)
        self.attn_sconv = ResidualConv(build, replicated(hidden, build.size), taps)
        self.post_attention_layernorm = RMSNorm(build, hidden, eps)
        dense = config.mlp_layer_types[index] == "dense"
        self.mlp = (
            GatedMLP(build, hidden, config.intermediate_size, config.hidden_act)
            if dense
            else InklingMoE(build, _moe_sizes(config))
        )
        self.mlp_sconv = ResidualConv(build, replicated(hidden, build.size), taps)

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x = self.attn_sconv(self.self_attn(x, cache), cache)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp_sconv(self.mlp(x), cache), residual


def _attention(config: Any, build: BuildContext, index: int, scaling: LogScaling | None) -> DistanceBiasAttention:
    kind = config.layer_types[index]
    if kind not in ("hybrid", "hybrid_sliding"):
        raise ValueError(f"layer_types[{index}] is {kind!r}; {config.model_type} here has hybrid and hybrid_sliding")
    windowed = kind == "hybrid_sliding"
    heads, kv_heads, head_dim = (
        getattr(config, f"swa_{name}" if windowed else name)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    window = config.sliding_window_size if windowed else None
    shape = AttentionSizes(
        config.hidden_size, heads, kv_heads, head_dim, 1 / head_dim, window, distances=window or config.rel_extent
    )
    return DistanceBiasAttention(
        build, shape, config.d_rel, config.conv_kernel_size, config.rms_norm_eps, None if windowed else scaling
    )


def _moe_sizes(config: Any) -> moe.MoESizes:
    return moe.MoESizes(
        hidden=config.hidden_size,
        width=config.moe_intermediate_size,
        experts=config.n_routed_experts + config.n_shared_experts,
        top_k=config.num_experts_per_tok + config.n_shared_experts,
        activation=config.hidden_act,
        renormalize=True,
        scores="sigmoid",
        bias="gate.e_score_correction_bias",
        scale=config.route_scale,
        fp32_router=True,
    )


class InklingForCausalLM(CausalLM):
    """Embeddings are normed; layers with a window have heads of their own; some have one feed-forward, others
    experts."""

    ignored_tensors = (*CausalLM.ignored_tensors, r"model\.mtp\..*")
    recordable = False  # its attention is torch's

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        if not config.shared_expert_sink:
            raise ValueError(f"{config.model_type} with shared_expert_sink=False is not supported")
        hidden, floor = config.hidden_size, config.log_scaling_n_floor
        scaling = LogScaling(build, config.log_scaling_alpha, floor) if floor else None
        layers = (InklingDecoderLayer(config, build, index, scaling) for index in range(config.num_hidden_layers))
        parts = {
            "embed_tokens": VocabParallelEmbedding(build, config.vocab_size, hidden),
            "embed_norm": RMSNorm(build, hidden, config.rms_norm_eps),
            "layers": nn.ModuleList(layers),
            "norm": RMSNorm(build, hidden, config.rms_norm_eps),
        }
        self.model = NamedTrunk(build, parts)
        if scaling is not None:
            self.scaling = scaling
        wanted = build.requested_outputs
        tokens = min(config.vocab_size, config.unpadded_vocab_size or config.vocab_size)
        cut = replace(wanted, vocab_size=min(wanted.vocab_size or tokens, tokens))
        self.lm_head = LMHead.from_config(replace(build, requested_outputs=cut), config)
        self._scale, self._factor = build.ops.take("scale").scale, 1 / config.logits_mup_width_multiplier
        self._routed = config.n_routed_experts

    def head(self, x: Tensor) -> Tensor:
        return super().head(self._scale(x, self._factor))

    @classmethod
    def canonical(cls, name: str) -> str:
        """The modules' names; the feed-forwards of shared experts are renamed once all are known."""
        for theirs, ours in NAMES:
            name = re.sub(theirs, ours, name)
        return name

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        """Splits stacks of experts, and rows of gate and up that take turns."""
        if found := INTERLEAVED.fullmatch(name):
            turns = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
            if found[2].startswith("w13"):
                return {f"{found[1]}.{part}.weight": (rows,) for part, rows in turns.items()}
            stack = found[2].partition(".")[0]
            return {
                f"{found[1]}.{stack}.{expert}.{part}.weight": (expert, rows)
                for expert in range(min(shape[0], moe.MAX_EXPERTS))
                for part, rows in turns.items()
            }
        if found := SHARED.fullmatch(name):
            count = min(shape[0], moe.MAX_EXPERTS)
            return {f"{found[1]}.shared_experts.{expert}.{found[2]}.weight": (expert,) for expert in range(count)}
        return moe.unstacked(name, shape)

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Numbers shared experts behind the others, and multiplies a feed-forward by the number that it learned."""
        found: dict[str, Any] = {}
        for name, entry in entries.items():
            if name.endswith(".e_score_correction_bias"):
                shared = entries[f"{name.rpartition('.')[0]}.weight"].shape[0] - entry.shape[0]
                entry = TransformedTensor(entry, partial(_chosen, count=shared), (), (entry.shape[0] + shared,))
            elif name.endswith(".mlp.down_proj.weight") and (factor := entries.get(_factor_of(name))) is not None:
                entry = TransformedTensor(entry, _multiplied, (factor,))
            elif ".shared_experts." in name:
                before, _, after = name.partition(".shared_experts.")
                index, _, part = after.partition(".")
                name = f"{before}.experts.{self._routed + int(index)}.{part}"
            if not name.endswith(".mlp.global_scale"):
                found[name] = entry
        return found


def _factor_of(name: str) -> str:
    return name.replace(".down_proj.weight", ".global_scale")


def _chosen(bias: Tensor, count: int) -> Tensor:
    """[E] -> [E + count]: the last are always chosen."""
    return torch.nn.functional.pad(bias.float(), (0, count), value=ALWAYS)


def _multiplied(weight: Tensor, factor: Tensor) -> Tensor:
    return weight.float() * factor.float()
