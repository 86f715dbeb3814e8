"""Zamba 2 (Glorioso et al. 2024): Mamba 2, and transformer blocks that several layers share, with adapters for each."""

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.attention.shared_block import AdaptedAttention, AdaptedMLP, SharedBlock, SharedBlockUse
from quintet.layers.build import BuildContext, replicated
from quintet.layers.decoder import BlockFactory, CausalLM, DecoderTrunk, refuse, run_residual_layers
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead, column_parallel
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary, head_dim
from quintet.layers.ssm.mamba import Mamba2, Mamba2Sizes

# a layer's parts beside a shared block have the names of a layer without one
RENAMED = {".mamba_decoder.": ".", "model.final_layernorm.": "model.norm."}


class Zamba2DecoderLayer(nn.Module):
    """A norm and a state space. What a shared block makes of the residual and the embedding joins the norm's input."""

    def __init__(self, config: Any, build: BuildContext, shared: SharedBlock | None) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_layernorm = RMSNorm(build, hidden, config.rms_norm_eps)
        self.mamba = Mamba2(build, spaces(config))
        self.shared_transformer, self._ops = shared, build.ops.take("add", "beside")
        if shared is not None:
            self.linear = column_parallel(build, hidden, {"linear": replicated(hidden, build.size)})

    def forward(self, embedded: Tensor, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        if self.shared_transformer is None:
            normed, total = self.input_layernorm(x, residual)
            return self.mamba(normed, cache), total
        total = x if residual is None else self._ops.add(x, residual)
        made = self.linear(self.shared_transformer(self._ops.beside(total, embedded), cache))
        return self.mamba(self.input_layernorm(self._ops.add(made, total)), cache), total


class Zamba2Model(DecoderTrunk):
    """Every layer may read the embedding."""

    def __init__(self, config: Any, build: BuildContext, block: BlockFactory) -> None:
        super().__init__(config, build, block)
        self.reads = (config.hidden_size,)

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        build, first = self._build, self._build.stage.first
        embedded = self.embed_tokens.embed(cache.batch) if first else cache.shared_tensors(build.dtype, self.reads)[0]
        layers = [functools.partial(layer, embedded) for layer in self.layers]
        out = run_residual_layers(layers, self.norm, embedded if first else None, cache, build)
        cache.send_shared([embedded])
        return out


class Zamba2ForCausalLM(CausalLM):
    """Time steps are time_step_min at least, and blocks shared if the embedding is tied, as transformers has it."""

    renamed_tensors = RENAMED
    model: Zamba2Model

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse(config, "use_long_context")
        if not config.tie_word_embeddings:
            raise ValueError(
                "zamba2 with tie_word_embeddings=False is not supported: transformers then shares no block"
            )
        rotary, blocks = Rotary.from_config(build, config) if config.use_mem_rope else None, dict[int, SharedBlock]()
        self.ignored_tensors = CausalLM.ignored_tensors
        shape = replace(
            AttentionSizes.from_config(config, scale=(head_dim(config) / 2) ** -0.5),
            hidden=config.attention_hidden_size,
        )
        sizes, bias = (config.hidden_size, config.intermediate_size), config.add_bias_linear

        def shared(index: int) -> SharedBlock:
            number = config.hybrid_layer_ids.index(index)
            which = number % config.num_mem_blocks
            path = f"model.layers.{config.hybrid_layer_ids[which]}.shared_transformer"
            use = SharedBlockUse(path, number, config.adapter_rank)
            own = use if config.use_shared_attention_adapter else None
            norms = tuple(RMSNorm(build, width, config.rms_norm_eps) for width in (shape.hidden, sizes[0]))
            feed = AdaptedMLP(build, sizes, config.hidden_act, bias, use)
            attention = AdaptedAttention(build, shape, rotary, sizes[0], own)
            return SharedBlock((norms[0], norms[1]), attention, feed, blocks.get(which))

        def block(config: Any, build: BuildContext, index: int) -> Zamba2DecoderLayer:
            if index not in config.hybrid_layer_ids:
                return Zamba2DecoderLayer(config, build, None)
            made = shared(index)
            blocks.setdefault(config.hybrid_layer_ids.index(index) % config.num_mem_blocks, made)
            return Zamba2DecoderLayer(config, build, made)

        self.model = Zamba2Model(config, build, block)
        for index in config.hybrid_layer_ids[config.num_mem_blocks :]:  # files may hold what is shared again
            self.ignored_tensors = (*self.ignored_tensors, rf"model\.layers\.{index}\.shared_transformer\..*")
        self.lm_head = LMHead.from_config(build, config)

    def shared_tensor_widths(self, at: int) -> tuple[int, ...]:
        """The embedding."""
        return self.model.reads


def spaces(config: Any) -> Mamba2Sizes:
    """The sizes of a state space."""
    return Mamba2Sizes(
        hidden=config.hidden_size, heads=config.n_mamba_heads, head_dim=config.mamba_headdim,
        groups=config.mamba_ngroups, state=config.mamba_d_state, conv_kernel=config.mamba_d_conv, eps=1e-5,
        bias=config.add_bias_linear, output_bias=config.add_bias_linear, dt_min=config.time_step_min,
    )  # fmt: skip
