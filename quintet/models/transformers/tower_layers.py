"""Our layers and attention in transformers' towers: torch computes bfloat16 slowly on processors without it."""

import math
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.types import AttentionSpec, Batch
from quintet.layers.build import BuildContext, Layer, replicated
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.weight_transform import TransformedTensor
from quintet.models.transformers.layer_replacement import is_within
from quintet.models.transformers.layers import HFColumnParallelLinear
from quintet.ops.activation import KINDS

NAME = "quintet_tower"  # attn_implementation
HELD = "tower_attention"  # attribute of modules: their TowerAttention


class PatchLinear(HFColumnParallelLinear):
    """A convolution whose kernels lie side by side, as a product with each patch: [B, C, ...] -> [B, out, ...]."""

    kernel: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        counts = [size // step for size, step in zip(x.shape[2:], self.kernel, strict=True)]
        for axis, (count, step) in enumerate(zip(counts, self.kernel, strict=True), 2):
            x = x.narrow(axis, 0, count * step)
        axes = len(counts)
        apart = [each for pair in zip(counts, self.kernel, strict=True) for each in pair]
        order = [0, *range(2, 2 + 2 * axes, 2), 1, *range(3, 3 + 2 * axes, 2)]  # batch, places, channels, kernel
        patches = x.reshape(*x.shape[:2], *apart).permute(order)
        return super().forward(patches.reshape(len(x), *counts, -1)).movedim(-1, 1)


class Activation(Layer):
    """An activation by its name in checkpoints."""

    def __init__(self, build: BuildContext, kind: str) -> None:
        super().__init__(build, "activate")
        self._kind = kind

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.ops.activate(x.contiguous(), self._kind)
        return y


def replace_layers(theirs: nn.Module, build: BuildContext, float32: list[str]) -> dict[str, int]:
    """Puts our layers in the places of plain products, of convolutions of patches and of activations, whole on every
    rank; those in `float32` stay. Returns the inputs of each convolution's product by the name of its weight."""
    from transformers.activations import ACT2CLS

    plain = replace(build, quantization=QuantizationPlan())  # what asks for a convolution's dtype gets one of floats
    kinds = {ACT2CLS[kind]: kind for kind in KINDS if isinstance(ACT2CLS.get(kind), type)}
    patches = {}
    for path, module in list(theirs.named_modules()):
        if is_within(path, float32):
            continue
        made: Any = None
        name = path.rpartition(".")[2]
        if type(module) is nn.Linear:
            its = plain if name == "patch_embedding" else build  # SigLIP 2 asks for its dtype, too
            made = _product(HFColumnParallelLinear, its, name, (module.in_features, module.out_features), module)
        elif type(module) in (nn.Conv2d, nn.Conv3d) and _is_of_patches(module):
            inputs = module.in_channels * math.prod(module.kernel_size)
            made = _product(PatchLinear, plain, name, (inputs, module.out_channels), module)
            made.kernel, patches[f"{path}.weight"] = tuple(module.kernel_size), inputs
        elif type(module) in kinds:
            made = Activation(build, kinds[type(module)])
        if made is not None:
            theirs.set_submodule(path, made)
    return patches


def _product(
    made: type[HFColumnParallelLinear], build: BuildContext, name: str, sizes: tuple[int, int], module: Any
) -> Any:
    inputs, outputs = (replicated(each, build.size) for each in sizes)
    product: Any = made(build, inputs, {name: outputs}, module.bias is not None)
    product.in_features, product.out_features = sizes  # some towers ask
    return product


def _is_of_patches(module: Any) -> bool:
    plain = module.groups == 1 and set(module.dilation) == {1} and module.padding_mode == "zeros"
    padded = module.padding not in ("valid", (0,) * len(module.kernel_size))
    return plain and not padded and tuple(module.stride) == tuple(module.kernel_size)


def with_flat_kernels(entries: dict[str, Any], patches: dict[str, int]) -> dict[str, Any]:
    """Returns a checkpoint's tensors with kernels of patches as matrices [out, inputs]."""
    found = dict(entries)
    for name, inputs in patches.items():
        if name in entries and len(entries[name].shape) > 2:
            entry = entries[name]
            if math.prod(entry.shape[1:]) == inputs:  # another shape is refused by the loader
                found[name] = TransformedTensor(entry, _flat, new_shape=(entry.shape[0], inputs))
    return found


def _flat(kernels: Tensor) -> Tensor:
    return kernels.flatten(1)


class TowerAttention:
    """The op `attention` for a tower's modules, where tokens of an item see all others of it."""

    def __init__(self, build: BuildContext) -> None:
        self._attend, self._batches = build.ops.take("attention").attention, dict[tuple[int, int], Batch]()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [B, H, T, D], k and v [B, Hkv, T, D] -> [B, T, H, D]."""
        count, heads, tokens, width = q.shape
        spec = AttentionSpec(heads, k.shape[1], width, scale, q.dtype, 1, causal=False, source="none")
        rows = (each.transpose(1, 2).reshape(count * tokens, each.shape[1], width) for each in (q, k, v))
        return self._attend(*rows, self._batch(count, tokens), spec, None).reshape(count, tokens, heads, width)

    def _batch(self, count: int, tokens: int) -> Batch:
        """A step of `count` items. Those of an image's windows and tiles come again in each layer."""
        if (count, tokens) not in self._batches:
            if len(self._batches) > 64:
                self._batches.clear()
            places, starts = torch.arange(count * tokens, dtype=torch.int32), torch.arange(count + 1) * tokens
            self._batches[count, tokens] = Batch(
                places, places % tokens, places // tokens, starts.to(torch.int32), places[:1]
            )
        return self._batches[count, tokens]


def use_attention(theirs: Any, build: BuildContext) -> None:
    """Has a tower's modules call the platform's attention, where it has a kernel of its own."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import sdpa_mask

    if build.ops.choice("attention").provider != "native":
        return
    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, _attended)
        AttentionMaskInterface.register(NAME, sdpa_mask)
    attention = TowerAttention(build)
    for module in theirs.modules():
        module.__dict__[HELD] = attention
        own = isinstance(module, PreTrainedModel) and module is not theirs  # a tower, not the wrapper with the text
        if own and hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS"):
            # a config hands it to those in it; without SDPA a mask must be of floats (Gemma 4's encoder of sounds)
            module.config._attn_implementation = NAME if module._supports_sdpa else "eager"


def _attended(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: ours without a mask, torch's with one."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = more.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    plain = attention_mask is None and not causal and query.shape[2] == key.shape[2]
    if not plain or key.shape != value.shape or more.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    scale = more.get("scaling")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return getattr(module, HELD)(query, key, value, scale), None
