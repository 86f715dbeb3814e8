"""Moonshine's encoder (Jeffries et al. 2024): three convolutions over samples, and pre-norm blocks with rotary."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from quintet.interface.weights import Weight
from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, Layer, replicated, vector_weight
from quintet.layers.encoder_decoder import EPS, CrossProjection
from quintet.layers.layer_state import StepState
from quintet.layers.linear import ColumnParallelLinear, column_parallel
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.rope import Rotary
from quintet.layers.weight_transform import TransformedTensor
from quintet.media.audio.log_mel import CHUNK_SAMPLES
from quintet.media.audio.waveform import BLOCK, CONVOLUTIONS, num_rows
from quintet.models.encoders.base import CrossEncoder

_CONV = re.compile(r"model\.encoder\.conv[123]\.weight")
_DOWN = re.compile(r"(model\.decoder\.layers\.\d+\.mlp)\.fc2\b")
_HEADS = tuple(f"{part}_num_{kind}_heads" for part in ("encoder", "decoder") for kind in ("attention", "key_value"))


def canonical_name(name: str) -> str:
    """Returns the modules' name of a checkpoint's tensor; some were saved without the head's class around them."""
    if name.startswith(("encoder.", "decoder.")):
        name = f"model.{name}"
    return "lm_head.weight" if name == "proj_out.weight" else _DOWN.sub(r"\1.down_proj", name)


def attention_sizes(config: Any) -> AttentionSizes:
    """Returns the sizes of every attention. ValueError if heads differ, which transformers' class does not compute."""
    if len({getattr(config, name) for name in _HEADS}) > 1:
        counts = ", ".join(f"{name} {getattr(config, name)}" for name in _HEADS)
        raise ValueError(f"heads of queries, keys and both parts must be as many; there are {counts}: correct them")
    return AttentionSizes.from_config(config, bias=config.attention_bias)


def rotary_of(config: Any, build: BuildContext) -> Rotary:
    """Returns the rotary embedding of queries and keys: of the first features of a head, neighbours paired."""
    return Rotary.from_config(build, config, partial=True, interleaved=True)


class GroupNorm(Layer):
    """Rows [T, H], normalised all together; then times a weight plus a bias."""

    def __init__(self, build: BuildContext, width: int) -> None:
        super().__init__(build)
        self._build, self._width = build, width
        self.weight: Tensor
        self.bias: Tensor

    def weights(self, path: str) -> list[Weight]:
        return [vector_weight(self._build, f"{path}.{name}", self._width) for name in ("weight", "bias")]

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape, eps=EPS) * self.weight + self.bias


class MoonshineBlock(nn.Module):
    """Pre-norm attention and feed-forward. It hands its last branch and the residual on apart."""

    def __init__(self, config: Any, build: BuildContext, attention: SelfAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(build, config.hidden_size, EPS, ("weight",))
        self.self_attn = attention
        self.post_attention_layernorm = LayerNorm(build, config.hidden_size, EPS, ("weight",))
        self.mlp = mlp

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x, cache), residual)
        return self.mlp(x), residual


class MoonshineEncoder(CrossEncoder):
    """The encoder, and for each decoder layer the products that make K and V of its rows."""

    recordable = False  # few recordings are of one length
    # of the decoder, all but those two
    ignored_tensors: tuple[str, ...] = (
        r"model\.decoder\.(embed_tokens|norm)\..*",
        r"model\.decoder\.layers\.\d+\.(self_attn|mlp|input_layernorm|post_attention_layernorm|final_layernorm)\..*",
        r"model\.decoder\.layers\.\d+\.encoder_attn\.(q_proj|o_proj)\..*",
        r"lm_head\.weight",
    )

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        self.rows, self._dtype = num_rows(CHUNK_SAMPLES), build.dtype
        self._activate = build.ops.take("activate").activate
        build, width, sizes = replace(build, max_model_len=self.rows), config.hidden_size, attention_sizes(config)
        attention, rotary = replace(sizes, causal=False, uses_kv_cache=False), rotary_of(config, build)

        def block() -> MoonshineBlock:
            inner = (width, config.intermediate_size)
            mlp = MLP(build, inner, config.encoder_hidden_act, ("fc1", "fc2"))
            return MoonshineBlock(config, build, SelfAttention(build, attention, rotary), mlp)

        parts = {
            "conv1": _convolution(build, "conv1", 2 * BLOCK, width, bias=False),
            "groupnorm": GroupNorm(build, width),
            "conv2": _convolution(build, "conv2", CONVOLUTIONS[1][0] * width, 2 * width),
            "conv3": _convolution(build, "conv3", CONVOLUTIONS[2][0] * 2 * width, width),
            "layers": nn.ModuleList(block() for _ in range(config.encoder_num_hidden_layers)),
            "layer_norm": LayerNorm(build, width, EPS, ("weight",)),
        }
        self.model = nn.ModuleDict({"encoder": nn.ModuleDict(parts)})
        numbers = range(config.decoder_num_hidden_layers)
        self.cross = nn.ModuleList(CrossProjection(sizes, build, each) for each in numbers)

    canonical = staticmethod(canonical_name)  # no other name depends on the class

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convolutions become matrices [out, taps * in], taps side by side; the first gets a tap of zeros."""
        found = dict(entries)
        for name, entry in entries.items():
            if _CONV.fullmatch(name) and len(entry.shape) == 3:
                outputs, inputs, taps = entry.shape
                shape = (outputs, inputs * taps if inputs > 1 else 2 * BLOCK)
                found[name] = TransformedTensor(entry, _as_matrix, new_shape=shape)
        return found

    def encode(self, cache: StepState) -> Tensor:
        parts, blocks = cast(Any, self.model["encoder"]), cache.batch.inputs.embeds
        assert blocks is not None, "an encoder's pass brings what it encodes"
        x = parts["groupnorm"](torch.tanh(parts["conv1"](_side_by_side(blocks.to(self._dtype), 2, 1))))
        for name, (taps, stride) in zip(("conv2", "conv3"), CONVOLUTIONS[1:], strict=True):
            x = self._activate(parts[name](_side_by_side(x, taps, stride)), "gelu")
        residual: Tensor | None = None
        for layer in parts["layers"]:
            x, residual = layer(x, residual, cache)
        out: Tensor = parts["layer_norm"](x, residual)[0]
        return out


def _convolution(
    build: BuildContext, name: str, inputs: int, outputs: int, bias: bool = True
) -> ColumnParallelLinear:  # fmt: skip
    """Returns the product with rows side by side. It stays in floats, as Whisper's."""
    plain = replace(build, quantization=QuantizationPlan())
    return column_parallel(plain, inputs, {name: replicated(outputs, build.size)}, bias)


def _as_matrix(weight: Tensor) -> Tensor:
    matrix = weight.permute(0, 2, 1).reshape(weight.shape[0], -1)
    return matrix if weight.shape[1] > 1 else functional.pad(matrix, (0, 2 * BLOCK - matrix.shape[1]))


def _side_by_side(x: Tensor, taps: int, stride: int) -> Tensor:
    """Rows [T, H] -> [(T - taps) // stride + 1, taps * H]: those that each step of a convolution sees."""
    return x.unfold(0, taps, stride).permute(0, 2, 1).reshape(-1, taps * x.shape[1])
