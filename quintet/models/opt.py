"""OPT (Zhang et al. 2022): learned positions, LayerNorm before or after the branches, relu."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention import Heads, SelfAttention
from quintet.layers.build import Build, Layer, even, whole
from quintet.layers.decoder import CausalLM
from quintet.layers.embedding import Embedding, PositionEmbedding
from quintet.layers.linear import Linear, LMHead, columns, rows
from quintet.layers.mlp import known
from quintet.layers.norm import LayerNorm
from quintet.platforms.interface import KV
from quintet.types import Batch

EPS = 1e-5  # of every norm
FIRST_ROW = 2  # of the position table; the rows before it are never looked up


def _norm(config: Any, build: Build) -> LayerNorm:
    return LayerNorm(build, config.hidden_size, EPS, affine=config.layer_norm_elementwise_affine)


class Block(Layer):
    """Attention and feed-forward; the norms stand before the branches, or (350M) after the sums."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(build, "add", "activate")
        hidden, bias, inner = config.hidden_size, config.enable_bias, even(config.ffn_dim, build.size)
        shape = Heads(
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
        self.fc1 = columns(build, hidden, {"fc1": inner}, bias)
        self.fc2 = rows(build, inner, ("fc2", hidden), bias)
        self.final_layer_norm = _norm(config, build)
        self._kind, self._before = known(config.activation_function), config.do_layer_norm_before

    def forward(self, x: Tensor, kv: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if self._before:
            branch, kv = self.self_attn(self.self_attn_layer_norm(x), kv, batch)
            x = self.ops.add(branch, x)
            return self.ops.add(self._feed(self.final_layer_norm(x)), x), kv
        branch, kv = self.self_attn(x, kv, batch)
        x = self.self_attn_layer_norm(self.ops.add(branch, x))
        return self.final_layer_norm(self.ops.add(self._feed(x), x)), kv

    def _feed(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.ops.activate(self.fc1(x), self._kind))
        return out


class Trunk(nn.Module):
    """Token and position embeddings, blocks, a last norm; projections where embeddings are narrower than blocks."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        self._ops = build.ops.take("add", "embedding")
        narrow, hidden = config.word_embed_proj_dim, config.hidden_size
        self.embed_tokens = Embedding(build, config.vocab_size, narrow)
        self.embed_positions = PositionEmbedding(build, config.max_position_embeddings, hidden, FIRST_ROW)
        self.layers = nn.ModuleList(Block(config, build) for _ in range(config.num_hidden_layers))
        last = config.do_layer_norm_before and not config._remove_final_layer_norm
        self.final_layer_norm = _norm(config, build) if last else nn.Identity()
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if narrow != hidden:
            self.project_in = _projection(build, narrow, "project_in", hidden)
            self.project_out = _projection(build, hidden, "project_out", narrow)

    def forward(self, kv: KV, batch: Batch) -> tuple[Tensor, KV]:
        x = self._ops.add(self.project_in(self.embed_tokens(batch.token_ids)), self.embed_positions(batch.positions))
        cache = []
        for block, pages in zip(self.layers, kv, strict=True):
            x, pages = block(x, pages, batch)
            cache.append(pages)
        x = self.final_layer_norm(self._ops.embedding(batch.logit_rows, x, 0, False))
        return self.project_out(x), tuple(cache)


def _projection(build: Build, inputs: int, name: str, outputs: int) -> Linear:
    return columns(build, inputs, {name: whole(outputs, build.size)})


class Model(CausalLM):
    """The trunk and a head that is tied to the token embedding, as a rule."""

    model: nn.ModuleDict

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"decoder": Trunk(config, build)})
        source = "/model.decoder.embed_tokens" if config.tie_word_embeddings else "/lm_head"
        self.lm_head = LMHead(build, config.word_embed_proj_dim, config.vocab_size, source)

    @staticmethod
    def canonical(name: str) -> str:
        """The first checkpoints have no "model."."""
        return f"model.{name}" if name.startswith("decoder.") else name

    def forward(self, kv: KV, batch: Batch) -> tuple[Tensor, KV]:
        x, kv = self.model["decoder"](kv, batch)
        return self.lm_head(x), kv
