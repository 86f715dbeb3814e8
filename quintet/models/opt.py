"""OPT (Zhang et al. 2022): learned positions, LayerNorm before or after the branches, relu."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, Layer, even_shards, replicated
from quintet.layers.decoder import CausalLM, run_layers, select_output_rows
from quintet.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from quintet.layers.layer_state import StepState
from quintet.layers.linear import ColumnParallelLinear, LMHead, column_parallel, row_parallel
from quintet.layers.mlp import activation_name
from quintet.layers.norm import LayerNorm
from quintet.layers.pipeline import Stage, drop_other_layers

EPS = 1e-5  # of every norm
FIRST_ROW = 2  # of the position table; the rows before it are never looked up


def _norm(config: Any, build: BuildContext) -> LayerNorm:
    parts = ("weight", "bias") if config.layer_norm_elementwise_affine else ()
    return LayerNorm(build, config.hidden_size, EPS, parts)


class OPTDecoderLayer(Layer):
    """Attention and feed-forward; the norms stand before the branches, or (350M) after the sums."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build, "add", "activate")
        hidden, bias, inner = config.hidden_size, config.enable_bias, even_shards(config.ffn_dim, build.size)
        shape = AttentionSizes(
            hidden=hidden,
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            head_dim=hidden // config.num_attention_heads,
            bias=bias,
            output_bias=bias,
            output="out_proj",
        )
        self.self_attn = SelfAttention(build, shape, None)
        self.self_attn_layer_norm = _norm(config, build)
        self.fc1 = column_parallel(build, hidden, {"fc1": inner}, bias)
        self.fc2 = row_parallel(build, inner, ("fc2", hidden), bias)
        self.final_layer_norm = _norm(config, build)
        self._kind, self._before = activation_name(config.activation_function), config.do_layer_norm_before

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        add = self.ops.add
        if self._before:
            x = add(self.self_attn(self.self_attn_layer_norm(x), cache), x)
            out: Tensor = add(self._feed(self.final_layer_norm(x)), x)
            return out
        x = self.self_attn_layer_norm(add(self.self_attn(x, cache), x))
        normed: Tensor = self.final_layer_norm(add(self._feed(x), x))
        return normed

    def _feed(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.ops.activate(self.fc1(x), self._kind))
        return out


class OPTDecoder(nn.Module):
    """Token and position embeddings, blocks, a last norm; projections where embeddings are narrower than blocks."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        self._ops, self._build = build.ops.take("add", "take_rows"), build
        narrow, hidden = config.word_embed_proj_dim, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(build, config.vocab_size, narrow)
        self.embed_positions = PositionEmbedding(build, config.max_position_embeddings, hidden, FIRST_ROW)
        self.layers = nn.ModuleList(OPTDecoderLayer(config, build) for _ in range(config.num_hidden_layers))
        last = config.do_layer_norm_before and not config._remove_final_layer_norm
        self.final_layer_norm = _norm(config, build) if last else nn.Identity()
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if narrow != hidden:
            self.project_in = _projection(build, narrow, "project_in", hidden)
            self.project_out = _projection(build, hidden, "project_out", narrow)

    @property
    def blocks(self) -> nn.ModuleList:
        """Its layers."""
        return self.layers

    def keep_stage(self, stage: Stage) -> None:
        """Drops the parts of other pipeline stages."""
        before, after = ["embed_tokens", "embed_positions", "project_in"], ["final_layer_norm", "project_out"]
        drop_other_layers(self, stage, before, "layers", after)

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        batch, stage, x = cache.batch, self._build.stage, None
        if stage.first:
            x = self._ops.add(self.project_in(self.embed_tokens.embed(batch)), self.embed_positions(batch.positions))
        x, taps = run_layers(self.layers, x, cache, self._build)
        if stage.last:
            x = self.project_out(self.final_layer_norm(select_output_rows(x, cache, self._ops)))
        return x, taps


def _projection(build: BuildContext, inputs: int, name: str, outputs: int) -> ColumnParallelLinear:
    return column_parallel(build, inputs, {name: replicated(outputs, build.size)})


class OPTForCausalLM(CausalLM):
    """The trunk and a head that is tied to the token embedding, as a rule."""

    trunk_name = "model.decoder"

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        self.model = nn.ModuleDict({"decoder": OPTDecoder(config, build)})
        source = "/model.decoder.embed_tokens" if build.ties_head(config) else "/lm_head"
        self.lm_head = LMHead(build, config.word_embed_proj_dim, config.vocab_size, source)

    @staticmethod
    def canonical(name: str) -> str:
        """The first checkpoints have no "model."."""
        return f"model.{name}" if name.startswith("decoder.") else name
