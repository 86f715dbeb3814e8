"""Llama 4 (Meta 2025), the text models: attention within chunks or without positions, experts with scaled inputs."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import DOWN, GATE, MAX_EXPERTS, UP, Experts, MoE, MoESizes
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import PositionScaling, Rotary

STACK = re.compile(rf"(.+\.experts)\.(gate_up_proj|{DOWN})")


class Llama4Attention(SelfAttention):
    """q and k are turned, and then normalised where the checkpoint says so; or not turned, and q grows with its
    position."""

    growth: PositionScaling | None

    def _apply_rotary(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.rotary is None:
            return (q if self.growth is None else self.growth(q, positions)), k
        q, k = self.rotary(q, k, positions)
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))


class ScaledMoE(MoE):
    """One expert for each token, the one with the largest logit; the logit's sigmoid scales the expert's input."""

    def __init__(self, build: BuildContext, mixture: MoESizes) -> None:
        super().__init__(build, mixture)
        self._routed = build.ops.take("route", "scale_rows")
        names = [f"experts.{expert}" for expert in range(mixture.experts)]
        self.experts = Experts(build, (mixture.hidden, mixture.width), mixture.activation, names, transposed=True)

    def share(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        ones, ids = self._routed.route(logits, 1, True)
        self.choice.record(ids)
        scores, _ = self.choice.choose(logits)  # of sigmoids that round to the same number, any is as good
        share: Tensor = self.experts(self._routed.scale_rows(x, scores), ones, ids)
        return share


class Llama4ForCausalLM(CausalLM):
    """Pre-norm blocks."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        if config.num_experts_per_tok != 1:
            raise ValueError(
                f"{config.model_type} with num_experts_per_tok={config.num_experts_per_tok} is not supported"
            )
        rotary, growth = Rotary.from_config(build, config, interleaved=True), _growth(config, build)
        mixture = MoESizes(
            hidden=config.hidden_size,
            width=config.intermediate_size,
            experts=config.num_local_experts,
            top_k=1,
            activation=config.hidden_act,
            renormalize=False,
            scores="sigmoid",
            shared=config.intermediate_size,
        )

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            turned, bias = bool(config.no_rope_layers[index]), config.attention_bias
            shape = AttentionSizes.from_config(config, chunk=_chunk(config, index), bias=bias, output_bias=bias)
            attention = Llama4Attention(build, shape, rotary if turned else None)
            attention.growth = None if turned else growth
            if turned and config.use_qk_norm:
                attention.q_norm = RMSNorm(build, shape.head_dim, config.rms_norm_eps, has_weight=False)
                attention.k_norm = RMSNorm(build, shape.head_dim, config.rms_norm_eps, has_weight=False)
            mlp: nn.Module
            if index in config.moe_layers:
                mlp = ScaledMoE(build, mixture)
            else:
                mlp = GatedMLP(build, config.hidden_size, config.intermediate_size_mlp, config.hidden_act)
            return PreNormBlock(config, build, attention, mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)

    @staticmethod
    def canonical(name: str) -> str:
        name = name.replace(".feed_forward.", ".mlp.")
        return name.replace(".mlp.router.", ".mlp.gate.").replace(".mlp.shared_expert.", ".mlp.shared_experts.")

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        """[E, D, 2 I], gate beside up, and [E, I, D]."""
        found = STACK.fullmatch(name)
        if found is None or len(shape) != 3 or not 0 < shape[0] <= MAX_EXPERTS:
            return {}
        if found[2] == DOWN:
            return {f"{found[1]}.{expert}.{DOWN}.weight": (expert,) for expert in range(shape[0])}
        if shape[2] % 2:
            raise ValueError(f"{name} has {shape[2]} columns, which are not gate's and up's, half of them each")
        half, rows = shape[2] // 2, slice(0, shape[1])
        return {
            f"{found[1]}.{expert}.{projection}.weight": (expert, rows, slice(first, first + half))
            for expert in range(shape[0])
            for projection, first in ((GATE, 0), (UP, half))
        }


def _chunk(config: Any, index: int) -> int | None:
    """The layer's, by the checkpoint's layer_types; None: it sees all."""
    kind, chunk = config.layer_types[index], config.attention_chunk_size
    if kind == "full_attention":
        return None
    if kind != "chunked_attention" or not chunk:
        raise ValueError(
            f"layer_types[{index}] is {kind!r}, and attention_chunk_size {chunk}; {config.model_type} here has full "
            "attention, and attention within chunks of some tokens"
        )
    return int(chunk)


def _growth(config: Any, build: BuildContext) -> PositionScaling | None:
    """One for all layers that turn nothing; None: no position that is served has another factor than 1."""
    if not config.attn_temperature_tuning or build.max_model_len < config.floor_scale:
        return None
    return PositionScaling(build, float(config.attn_scale), int(config.floor_scale), shift=1)
