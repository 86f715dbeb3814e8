"""Blocks of encoder-decoder models, with norms before or behind, and the base of their decoders."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.attention.cross import CrossAttention
from quintet.layers.build import BuildContext, Layer, even_shards, split_heads
from quintet.layers.decoder import CausalLM
from quintet.layers.layer_state import LayerMixer, StepState
from quintet.layers.linear import column_parallel, row_parallel
from quintet.layers.mlp import activation_name
from quintet.layers.norm import LayerNorm

EPS = 1e-5  # of every norm


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks of an encoder, or of a decoder."""

    width: int
    heads: int
    inner: int  # of the feed-forward
    activation: str
    pre_norm: bool = True  # False: norms stand behind the sums

    @classmethod
    def of(cls, config: Any, part: str, pre_norm: bool = True) -> "BlockSizes":
        """Reads the sizes of a part, "encoder" or "decoder". ValueError if heads do not share the width evenly."""
        width, heads = config.d_model, getattr(config, f"{part}_attention_heads")
        if width % heads:
            raise ValueError(f"d_model is {width}, no multiple of {heads} attention heads; correct config.json")
        return cls(width, heads, getattr(config, f"{part}_ffn_dim"), config.activation_function, pre_norm)

    def attention(self, **differences: Any) -> AttentionSizes:
        """Returns the sizes of an attention."""
        return AttentionSizes(
            hidden=self.width, heads=self.heads, kv_heads=self.heads, head_dim=self.width // self.heads, bias=True,
            output_bias=True, output="out_proj", **differences,
        )  # fmt: skip


class _Block(Layer):
    """Branches with a sum and a norm each; the last is the feed-forward."""

    def __init__(self, sizes: BlockSizes, build: BuildContext) -> None:
        super().__init__(build, "add", "activate")
        inner = even_shards(sizes.inner, build.size)
        self.final_layer_norm = LayerNorm(build, sizes.width, EPS)
        self.fc1 = column_parallel(build, sizes.width, {"fc1": inner}, True)
        self.fc2 = row_parallel(build, inner, ("fc2", sizes.width), True)
        self._kind, self._pre_norm = activation_name(sizes.activation), sizes.pre_norm

    def _attend(self, attention: nn.Module, norm: nn.Module, x: Tensor, cache: StepState) -> Tensor:
        if self._pre_norm:
            out: Tensor = self.ops.add(attention(norm(x), cache), x)
            return out
        normed: Tensor = norm(self.ops.add(attention(x, cache), x))
        return normed

    def _feed(self, x: Tensor) -> Tensor:
        before = self.final_layer_norm(x) if self._pre_norm else x
        out: Tensor = self.ops.add(self.fc2(self.ops.activate(self.fc1(before), self._kind)), x)
        return out if self._pre_norm else self.final_layer_norm(out)


class CrossEncoderBlock(_Block):
    """Attention both ways, which keeps nothing, and feed-forward."""

    def __init__(self, sizes: BlockSizes, build: BuildContext) -> None:
        super().__init__(sizes, build)
        self.self_attn_layer_norm = LayerNorm(build, sizes.width, EPS)
        self.self_attn = SelfAttention(build, sizes.attention(causal=False, uses_kv_cache=False), None)

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        return self._feed(self._attend(self.self_attn, self.self_attn_layer_norm, x, cache))


class CrossDecoderBlock(_Block):
    """Attention to the text before, to the encoder's rows, and feed-forward."""

    def __init__(self, sizes: BlockSizes, build: BuildContext) -> None:
        super().__init__(sizes, build)
        self.self_attn_layer_norm = LayerNorm(build, sizes.width, EPS)
        self.self_attn = SelfAttention(build, sizes.attention(), None)
        self.encoder_attn_layer_norm = LayerNorm(build, sizes.width, EPS)
        self.encoder_attn = CrossAttention(build, sizes.attention())

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        x = self._attend(self.self_attn, self.self_attn_layer_norm, x, cache)
        return self._feed(self._attend(self.encoder_attn, self.encoder_attn_layer_norm, x, cache))


class CrossProjection(nn.Module):
    """K and V of one decoder layer, as products of an encoder's hidden states."""

    def __init__(self, sizes: AttentionSizes, build: BuildContext, index: int, key_bias: bool = True) -> None:
        """`sizes`: of the layer's cross-attention, whose biases the keys may lack."""
        super().__init__()
        path = f"/model.decoder.layers.{index}.encoder_attn"
        self._head_dim = sizes.head_dim
        outputs = split_heads(sizes.heads, sizes.kv_heads, build.size)[1].times(self._head_dim)
        self.k = column_parallel(build, sizes.hidden, {f"{path}.k_proj": outputs}, sizes.bias and key_bias)
        self.v = column_parallel(build, sizes.hidden, {f"{path}.v_proj": outputs}, sizes.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (each.reshape(x.shape[0], -1, self._head_dim) for each in (self.k(x), self.v(x)))
        return k, v


class CrossDecoderLM(CausalLM):
    """A decoder whose blocks have cross-attention, and its head; the worker builds the encoder beside it."""

    trunk_name = "model.decoder"
    supports_pipeline = False
    config_counts_layers = False  # num_hidden_layers is the number of one part
    positions_entry: ClassVar[str]  # of config.json: positions of the decoder
    ignored_tensors = (  # the encoder's
        *CausalLM.ignored_tensors,
        r"model\.encoder\..*",
        r"model\.decoder\.layers\.\d+\.encoder_attn\.(k_proj|v_proj)\..*",
    )

    @classmethod
    def max_text_length(cls, config: Any) -> int | None:
        length: int = getattr(config, cls.positions_entry)
        return length

    @property
    def cross_attention(self) -> list[CrossAttention]:
        """Cross-attention of the layers, in order."""
        layers: Any = self.get_submodule("model.decoder.layers")
        return [layer.encoder_attn for layer in layers]

    @property
    def cross_mixers(self) -> list[LayerMixer]:
        """Mixers of the layers' cross-attention, in order."""
        return [each.mixing for each in self.cross_attention]
