"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, weights stored [in, out]."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, refuse, run_layers, select_output_rows
from quintet.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from quintet.layers.layer_state import StepState
from quintet.layers.linear import CheckpointLayout, LMHead
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm
from quintet.layers.pipeline import Stage, drop_other_layers

CONV = CheckpointLayout(transposed=True)


class GPT2Block(nn.Module):
    """Pre-norm attention and feed-forward, both with biases."""

    def __init__(self, config: Any, build: BuildContext, index: int) -> None:
        super().__init__()
        self._ops = build.ops.take("add")
        width = config.hidden_size
        depth = index + 1 if config.scale_attn_by_inverse_layer_idx else 1
        head_dim = width // config.num_attention_heads
        shape = AttentionSizes(
            hidden=width,
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            head_dim=head_dim,
            scale=(head_dim**-0.5 if config.scale_attn_weights else 1.0) / depth,
            bias=True,
            output_bias=True,
            output="c_proj",
            stored=CheckpointLayout(fused="c_attn", transposed=True),
            output_stored=CONV,
        )
        self.ln_1 = LayerNorm(build, width, config.layer_norm_epsilon)
        self.attn = SelfAttention(build, shape, None)
        self.ln_2 = LayerNorm(build, width, config.layer_norm_epsilon)
        inner = config.n_inner or 4 * width
        self.mlp = MLP(build, (width, inner), config.activation_function, ("c_fc", "c_proj"), stored=CONV)

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        x = self._ops.add(self.attn(self.ln_1(x), cache), x)
        out: Tensor = self._ops.add(self.mlp(self.ln_2(x)), x)
        return out


class GPT2Model(nn.Module):
    """Token and position embeddings, blocks, a last norm."""

    block: type[GPT2Block] = GPT2Block

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        self._ops, self._build = build.ops.take("add", "take_rows"), build
        self.wte = VocabParallelEmbedding(build, config.vocab_size, config.hidden_size)
        self.wpe = PositionEmbedding(build, config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(self.block(config, build, i) for i in range(config.num_hidden_layers))
        self.ln_f = self.last_norm(config, build)

    def last_norm(self, config: Any, build: BuildContext) -> nn.Module:
        """Returns the norm behind the blocks."""
        return LayerNorm(build, config.hidden_size, config.layer_norm_epsilon)

    @property
    def blocks(self) -> nn.ModuleList:
        """Its layers."""
        return self.h

    def keep_stage(self, stage: Stage) -> None:
        """Drops the parts of other pipeline stages."""
        drop_other_layers(self, stage, ["wte", "wpe"], "h", ["ln_f"])

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        batch, stage, x = cache.batch, self._build.stage, None
        if stage.first:
            x = self._ops.add(self.wte.embed(batch), self.wpe(batch.positions))
        x, taps = run_layers(self.h, x, cache, self._build)
        return (self.ln_f(select_output_rows(x, cache, self._ops)) if stage.last else x), taps


class GPT2LMHeadModel(CausalLM):
    """The trunk and a head that is tied to the token embedding, as a rule."""

    trunk_name = "transformer"
    # the causal mask, stored
    ignored_tensors = (*CausalLM.ignored_tensors, r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse(config, "add_cross_attention")
        self.transformer = GPT2Model(config, build)
        self.lm_head = LMHead.from_config(build, config, "transformer.wte")

    @staticmethod
    def canonical(name: str) -> str:
        """The first checkpoints have no prefix."""
        return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
