"""Facts about one type of projector and its encoder, and about transformers' wrapper of the same model."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quintet.gguf.cursor import Array
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames

Entries = dict[str, Any]
MAX_IMAGE = 2**14  # pixels of a side that an encoder is made for


@dataclass(frozen=True)
class Projector:
    """Facts about one of clip.projector_type."""

    wrappers: Mapping[str, str]  # model_type of the text model -> the wrapper's
    names: ArchitectureNames | Callable[[GGUFModel], ArchitectureNames]
    config: Callable[[GGUFModel], Entries]  # entries of the wrapper's config.json, beside text_config and tokens
    width: tuple[str, int]  # tensor and axis that are as wide as a token of the text model
    tokens: Mapping[str, tuple[str, ...]]  # entry of config.json -> its token, and those that stand in for it
    processor: str  # transformers' class
    image_processor: str
    settings: Callable[[GGUFModel], Entries]  # of the processor
    image_settings: Callable[[GGUFModel], Entries]  # of the image processor, beside mean and deviation
    named: Mapping[str, str] = field(default_factory=dict)  # attribute of the tokenizer -> entry of `tokens`, or a word
    text_types: Mapping[str, str] = field(default_factory=dict)  # model_type of the text model -> within the wrapper
    kind: Callable[[GGUFModel], str] | None = None  # the wrapper's model_type, where the text model does not say it
    filled: Callable[[GGUFModel], Mapping[str, float]] = lambda mmproj: {}  # tensors that no output depends on

    def wrapper_of(self, text: str, mmproj: GGUFModel) -> str:
        """Returns the wrapper's model_type. ValueError if no wrapper has such a text model."""
        if text not in self.wrappers:
            raise ValueError(
                f"{mmproj.path} is no encoder for a text model of type {text!r}: those of its projector are "
                f"{', '.join(self.wrappers)}; give the mmproj file that was published with the model"
            )
        return self.kind(mmproj) if self.kind is not None else self.wrappers[text]

    def processor_settings(self, mmproj: GGUFModel) -> tuple[Entries, Entries]:
        """Returns the settings of the image processor, and of the processor. ValueError if the file lacks some."""
        return self.image_settings(mmproj) | normalization(mmproj), self.settings(mmproj)

    def text_width(self, mmproj: GGUFModel) -> int:
        """Returns the numbers of a row of the encoder."""
        name, axis = self.width
        return mmproj.shape(name, 2)[axis]


def vision_entries(mmproj: GGUFModel) -> Entries:
    """Returns the sizes of an encoder under SigLIP's names. ValueError where the tensors are of others."""
    width, layers = mmproj.required_number("embedding_length"), mmproj.required_number("block_count")
    held = mmproj.shape("patch_embd.weight", 4)
    patch, side = mmproj.required_number("patch_size"), mmproj.required_number("image_size")
    if held != (width, 3, patch, patch):
        raise ValueError(
            f"{mmproj.path}: v.patch_embd.weight is {list(held)}, not {[width, 3, patch, patch]}; fetch it again"
        )
    if layers > len(mmproj.tensors) or side > MAX_IMAGE or not patch <= side:
        raise ValueError(
            f"{mmproj.path}: its metadata are of {layers} layers for images of {side} pixels in patches of {patch}, "
            "which its tensors are not of; fetch it again"
        )
    return {
        "hidden_size": width,
        "intermediate_size": feed_forward(mmproj),
        "num_hidden_layers": layers,
        "num_attention_heads": heads(mmproj),
        "image_size": side,
        "patch_size": patch,
        "layer_norm_eps": mmproj.number("attention.layer_norm_epsilon", 1e-6),
    }


def heads(mmproj: GGUFModel) -> int:
    """Returns the number of heads. ValueError if the width is not made of so many."""
    if mmproj.required_number("embedding_length") % mmproj.heads:
        raise ValueError(
            f"{mmproj.path}: rows of {mmproj.required_number('embedding_length')} are not of {mmproj.heads} heads; "
            "fetch it again"
        )
    return mmproj.heads


def feed_forward(mmproj: GGUFModel) -> int:
    """Returns the width between the products of a layer, by their tensors: some files say another number."""
    shape = mmproj.shape("blk.0.ffn_up.weight", 2)
    return shape[1] if is_swapped(mmproj) else shape[0]


def is_swapped(mmproj: GGUFModel) -> bool:
    """True if the two products of a layer have one another's names, as in files of the first converters."""
    width = mmproj.required_number("embedding_length")
    up, down = (mmproj.shape(f"blk.0.ffn_{each}.weight", 2) for each in ("up", "down"))
    return up[0] == width and down[1] == width and up[1] != width


def activation(mmproj: GGUFModel, gelu: str, otherwise: str = "quick_gelu") -> str:
    """Returns the activation; `gelu`: what a file that says so means, which has one name for the exact one and its
    approximation."""
    if mmproj.metadata.get("clip.use_silu"):
        return "silu"
    return gelu if mmproj.metadata.get("clip.use_gelu") else otherwise


def normalization(mmproj: GGUFModel) -> Entries:
    """Returns the mean and the deviation of a picture's colours."""
    return {f"image_{name}": _colours(mmproj, f"image_{name}") for name in ("mean", "std")}


def _colours(mmproj: GGUFModel, key: str) -> list[float]:
    value = mmproj.metadata.get(f"{mmproj.prefix}.{key}")
    numbers = list(value) if isinstance(value, Array) and not value.of_strings else []
    if len(numbers) != 3 or not all(math.isfinite(each) for each in numbers) or (key == "image_std" and 0 in numbers):
        raise ValueError(f"{mmproj.path}: {mmproj.prefix}.{key} is not three numbers; fetch it again")
    return [float(each) for each in numbers]


def side_tokens(mmproj: GGUFModel, merge: int) -> int:
    """Returns the tokens along a side of a picture of the encoder's size, `merge` patches to one."""
    patches = mmproj.required_number("image_size") // mmproj.required_number("patch_size")
    if merge < 1 or patches < merge or patches % merge:
        raise ValueError(f"{mmproj.path}: {patches} patches of a side are not taken {merge} to one; fetch it again")
    return patches // merge
