"""RWKV-7 "Goose" (Peng et al. 2025), as flash-linear-attention stores it: a rule that replaces what a state holds."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from quintet.layers.build import BuildContext, split_heads
from quintet.layers.decoder import CausalLM, refuse, run_residual_layers
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead
from quintet.layers.norm import LayerNorm
from quintet.layers.pipeline import Stage, drop_other_layers
from quintet.layers.ssm.rwkv import RWKV7ChannelMix, RWKV7Sizes, RWKV7TimeMix

RENAMED = {"model.layers.0.pre_norm.": "model.pre_norm."}


class RWKV7Block(nn.Module):
    """Norm, rule, norm, feed-forward."""

    def __init__(
        self, build: BuildContext, norms: tuple[LayerNorm, LayerNorm], attn: RWKV7TimeMix, ffn: RWKV7ChannelMix
    ) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = norms
        self.attn, self.ffn = attn, ffn

    def forward(
        self, values: list[Tensor], x: Tensor, residual: Tensor | None, cache: StepState
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attn_norm(x, residual)
        x, residual = self.ffn_norm(self.attn(x, cache, values), residual)
        assert residual is not None
        return self.ffn(x, cache), residual


class RWKV7Model(nn.Module):
    """The embedding is normalised once more before the first block, and every block sees the first one's values."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        hidden, self._build = config.hidden_size, build
        parts = ("weight", "bias") if config.norm_bias else ("weight",)
        norm = functools.partial(LayerNorm, build, hidden, config.norm_eps, parts)
        ranks = {"w": config.decay_low_rank_dim, "a": config.a_low_rank_dim}
        ranks |= {"v": config.v_low_rank_dim, "g": config.gate_low_rank_dim}
        dim = config.head_dim
        shape = RWKV7Sizes(hidden, hidden // dim, dim, dim * config.norm_eps, ranks)

        def block(index: int) -> RWKV7Block:
            ffn = RWKV7ChannelMix(build, hidden, config.intermediate_size, config.hidden_act)
            return RWKV7Block(build, (norm(), norm()), RWKV7TimeMix(build, shape, index == 0), ffn)

        self.embeddings = VocabParallelEmbedding(build, config.vocab_size, hidden)
        self.pre_norm = norm() if config.norm_first else None
        self.layers = nn.ModuleList(block(index) for index in range(config.num_hidden_layers))
        self.norm = norm()
        heads, _ = split_heads(shape.heads, shape.heads, build.size)
        self.reads = (heads.times(dim).local(build.rank),)  # the first layer's values
        build.ops.take("take_rows", "add")

    @property
    def blocks(self) -> nn.ModuleList:
        """Its layers."""
        return self.layers

    def keep_stage(self, stage: Stage) -> None:
        """Drops the parts of other pipeline stages."""
        drop_other_layers(self, stage, ["embeddings", "pre_norm"], "layers", ["norm"])

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        build, x, values = self._build, None, cache.shared_tensors(self._build.dtype, self.reads)
        if build.stage.first:
            x = self.embeddings.embed(cache.batch)
            x = x if self.pre_norm is None else self.pre_norm(x)
        layers = [functools.partial(layer, values) for layer in self.layers]
        out = run_residual_layers(layers, self.norm, x, cache, build)
        cache.send_shared(values)
        return out


class RWKV7ForCausalLM(CausalLM):
    """Attention in some layers, and values wider than keys, are refused."""

    renamed_tensors = RENAMED
    ignored_tensors = (*CausalLM.ignored_tensors, r"model\.layers\.0\.attn\.v_lora\..*")  # some files have one
    model: RWKV7Model

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse(config, "attn")
        if any(width != config.hidden_size for width in config.value_dim):
            raise ValueError(f"rwkv7 with value_dim={config.value_dim} is not supported: values are as wide as keys")
        self.model = RWKV7Model(config, build)
        self.lm_head = LMHead.from_config(build, config, "model.embeddings")

    def shared_tensor_widths(self, at: int) -> tuple[int, ...]:
        """The first layer's values."""
        return self.model.reads

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        """Older files have the factors of a layer in one x_x [6, hidden]."""
        stem = name.removesuffix("x_x")
        return {} if stem == name else {f"{stem}x_{each}": (at, None, None) for at, each in enumerate("rwkvag")}
