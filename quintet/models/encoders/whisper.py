"""Whisper's encoder (Radford et al. 2022): two convolutions over log-mel frames, sinusoids, pre-norm blocks."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from quintet.layers.build import BuildContext, Layer, replicated
from quintet.layers.embedding import PositionEmbedding
from quintet.layers.encoder_decoder import EPS, BlockSizes, CrossEncoderBlock, CrossProjection
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel
from quintet.layers.norm import LayerNorm
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.weight_transform import TransformedTensor
from quintet.media.audio.log_mel import FRAMES
from quintet.models.encoders.base import CrossEncoder

TAPS = 3  # frames that a convolution sees
STRIDE = 2  # of the second one: frames of one row
_CONV = re.compile(r"model\.encoder\.conv[12]\.weight")
_QUERY_BIAS = re.compile(r"(model\.(?:encoder|decoder)\.layers\.\d+\.self_attn)\.q_proj\.bias")


def canonical_name(name: str) -> str:
    """Returns the modules' name of a checkpoint's tensor; some were saved without the head's class around them."""
    if name.startswith(("encoder.", "decoder.")):
        return f"model.{name}"
    return "lm_head.weight" if name == "proj_out.weight" else name


def with_plain_products(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint's tensors with convolutions as matrices [out, 3 * in], taps side by side, and with the bias
    of keys, which Whisper does not have: zeros."""
    found = dict(entries)
    for name, entry in entries.items():
        if _CONV.fullmatch(name) and len(entry.shape) == TAPS:
            outputs, inputs, taps = entry.shape
            found[name] = TransformedTensor(entry, _taps_first, new_shape=(outputs, taps * inputs))
        elif (match := _QUERY_BIAS.fullmatch(name)) is not None:
            found.setdefault(f"{match[1]}.k_proj.bias", TransformedTensor(entry, torch.zeros_like))
    return found


def _taps_first(weight: Tensor) -> Tensor:
    return weight.permute(0, 2, 1).reshape(weight.shape[0], -1)


class MelConvolutions(Layer):
    """Frames [2 * E + 2, mel bins], of which the first and the last are zeros -> [E, H].

    A convolution is a product with the frames that it sees side by side. It stays in floats: it takes 2 % of the time.
    """

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build, "beside", "activate")
        plain, self._width = replace(build, quantization=QuantizationPlan()), config.d_model
        outputs = replicated(config.d_model, build.size)
        self.conv1 = column_parallel(plain, TAPS * config.num_mel_bins, {"/model.encoder.conv1": outputs}, True)
        self.conv2 = column_parallel(plain, TAPS * config.d_model, {"/model.encoder.conv2": outputs}, True)
        self._build = build
        self.nothing: Tensor

    def constants(self) -> Mapping[str, Tensor]:
        return {"nothing": torch.zeros(1, self._width, dtype=self._build.dtype)}

    def forward(self, frames: Tensor) -> Tensor:
        beside, gelu = self.ops.beside, self.ops.activate
        x = beside(beside(frames[:-2], frames[1:-1]), frames[2:])
        x = gelu(self.conv1(x), "gelu")  # [2 * E, H]
        pairs = x.reshape(-1, STRIDE * self._width)  # frames 2 * t and 2 * t + 1
        before = beside(self.nothing, x.reshape(1, -1))[:, : x.numel()].reshape(pairs.shape)  # 2 * t - 1 and 2 * t
        out: Tensor = gelu(self.conv2(beside(before, pairs[:, self._width :])), "gelu")
        return out


class WhisperEncoder(CrossEncoder):
    """The encoder, and for each decoder layer the product that makes K and V of its rows."""

    has_timestamps = True
    # of the decoder, all but those two
    ignored_tensors: tuple[str, ...] = (
        r"model\.decoder\.(embed_tokens|embed_positions|layer_norm)\..*",
        r"model\.decoder\.layers\.\d+\.(self_attn|self_attn_layer_norm|encoder_attn_layer_norm|final_layer_norm)\..*",
        r"model\.decoder\.layers\.\d+\.(fc1|fc2|encoder_attn\.(q_proj|out_proj))\..*",
        r"lm_head\.weight",
    )

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        self.rows, self.mel_bins, self._dtype = config.max_source_positions, config.num_mel_bins, build.dtype
        self.frames = STRIDE * self.rows + 2
        if STRIDE * self.rows > FRAMES:
            raise ValueError(f"max_source_positions is {self.rows}, and audio has {FRAMES // STRIDE}; fetch it again")
        self._ops = build.ops.take("add")
        whole = replace(build, max_model_len=self.rows)
        sizes, decoder = BlockSizes.of(config, "encoder"), BlockSizes.of(config, "decoder")
        layers = nn.ModuleList(CrossEncoderBlock(sizes, whole) for _ in range(config.encoder_layers))
        parts = {
            "embed_positions": PositionEmbedding(whole, self.rows, config.d_model),
            "layers": layers,
            "layer_norm": LayerNorm(whole, config.d_model, EPS),
        }
        self.convolutions = MelConvolutions(config, whole)
        self.model = nn.ModuleDict({"encoder": nn.ModuleDict(parts)})
        cross, numbers = decoder.attention(), range(config.decoder_layers)
        self.cross = nn.ModuleList(CrossProjection(cross, whole, each, key_bias=False) for each in numbers)

    canonical = staticmethod(canonical_name)  # no other name depends on the class

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convolutions become matrices."""
        return with_plain_products(entries)

    def encode(self, cache: StepState) -> Tensor:
        parts, embeds = cast(Any, self.model["encoder"]), cache.batch.inputs.embeds
        assert embeds is not None, "an encoder's pass brings what it encodes"
        x = self.convolutions(embeds.to(self._dtype))
        x = self._ops.add(x, parts["embed_positions"](cache.batch.positions))
        for layer in parts["layers"]:
            x = layer(x, cache)
        out: Tensor = parts["layer_norm"](x)
        return out
