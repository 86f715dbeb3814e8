"""Metadata and tensors of a model in GGUF files, with checked access to the entries of its architecture."""

import functools
import math
from collections.abc import Sequence
from typing import Any

from quintet.gguf.cursor import Array, format_name
from quintet.gguf.file import GGUFFile
from quintet.gguf.tensor_types import GGUFTensor

MMPROJ = "clip"  # architecture of encoders of images and audio, which lie beside a model
VISION = "v."  # before the names of an encoder's tensors


class GGUFModel:
    """Metadata and tensors of all files of a model, or of an encoder of images (mmproj)."""

    def __init__(self, files: Sequence[GGUFFile]) -> None:
        self.path, self.metadata = files[0].path, files[0].metadata
        architecture = str(self.metadata.get("general.architecture"))
        self.is_mmproj = architecture == MMPROJ
        self.prefix = f"{MMPROJ}.vision" if self.is_mmproj else architecture  # of its entries
        own = VISION if self.is_mmproj else ""  # what its tensors' names begin with
        self.tensors: dict[str, tuple[GGUFFile, GGUFTensor]] = {
            name.removeprefix(own): (f, each) for f in files for name, each in f.tensors.items()
        }

    def get(self, key: str, default: Any = None) -> Any:
        """Returns an entry of the architecture.

        A list with a number for each layer becomes the number, where all are equal but those of 0, of layers that lack
        what is counted. ValueError for other lists.
        """
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if not isinstance(value, Array) or value.of_strings:
            return value
        numbers = set(value)
        if len(numbers) > 1:
            numbers -= {0}
        if len(numbers) > 1:
            raise ValueError(
                f"{self.path}: {self.prefix}.{key} differs from layer to layer, which quintet does not read"
            )
        return numbers.pop() if numbers else default

    def per_layer(self, key: str, default: Any = None) -> list[Any]:
        """An entry of each layer [layers]; ValueError if a list has fewer. `key`: of the architecture, or whole."""
        value = self.metadata.get(key, self.metadata.get(f"{self.prefix}.{key}", default))
        if not isinstance(value, Array):
            return [value] * self.layers
        found = list(value)[: self.layers]
        if len(found) < self.layers:
            raise ValueError(f"{self.path}: {self.prefix}.{key} has {len(found)} numbers for {self.layers} layers")
        return found

    def required_number(self, key: str, default: int | None = None) -> int:
        """A number that the model cannot do without."""
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.path}: {self.prefix}.{key} is {_format_value(value)}, not a whole number from 1")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """A number from 0."""
        return self.required_number(key, default) if self.get(key, default) else 0

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{self.path}: {self.prefix}.{key} is {_format_value(value)}, not a number")
        return float(value)

    def has(self, name: str) -> bool:
        """True if the files hold this tensor."""
        return name in self.tensors

    def shape(self, name: str, axes: int = 1) -> tuple[int, ...]:
        """ValueError if there is no such tensor, or if it has fewer axes."""
        if name not in self.tensors:
            raise ValueError(f"{self.path} holds no tensor {name}: it is another sort of file, or not whole")
        found = self.tensors[name][1].shape
        if len(found) < axes:
            raise ValueError(f"{self.path}: {name} is {list(found)}, and it is to have {axes} axes; fetch it again")
        return found

    def floats(self, name: str, count: int) -> list[float] | None:
        """Returns the numbers of a tensor of F32 [count]; None if there is none. ValueError for another shape."""
        if not self.has(name):
            return None
        file, each = self.tensors[name]
        if each.kind.name != "F32" or each.shape != (count,):
            raise ValueError(f"{self.path}: {name} is {list(each.shape)} of {each.kind.name}, not [{count}] of F32")
        return file.floats(each)

    @functools.cached_property
    def layers(self) -> int:
        """Number of layers, without those that predict further tokens (MTP) and stand behind them."""
        blocks = self.required_number("block_count") - self.count("nextn_predict_layers")
        return min(blocks, len(self.tensors))

    @property
    def heads(self) -> int:
        return self.required_number("attention.head_count")

    @property
    def kv_heads(self) -> int:
        return self.required_number("attention.head_count_kv", self.heads)

    def in_any_layer(self, name: str) -> bool:
        """True if some layer has this tensor."""
        return any(self.has(f"blk.{index}.{name}") for index in range(self.layers))

    @property
    def head_dim(self) -> int:
        default = max(1, self.required_number("embedding_length") // self.heads)
        return self.required_number("attention.key_length", default)

    @property
    def window(self) -> int | None:
        """Tokens that are looked back at; None for all of them, as 0 says too."""
        return self.required_number("attention.sliding_window") if self.get("attention.sliding_window") else None

    @functools.cached_property
    def rotary_dim(self) -> int:
        """Features of a head that are turned."""
        return self.required_number("rope.dimension_count", self.head_dim)


def _format_value(value: Any) -> str:
    """A text in quotes, without line ends; others as they are."""
    return format_name(value) if isinstance(value, str) else str(value)[:40]
