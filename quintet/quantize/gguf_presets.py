"""llama.cpp's names of GGUF files, and which type each tensor has in one."""

from collections.abc import Callable
from dataclasses import dataclass

from quintet.quantize.ggml_blocks import SUPER

BLOCK = 32  # values of a block of the older types
SMALLER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # where 256 does not divide a row, as llama.cpp has it
More = Callable[[int, int], bool]  # layer, number of layers -> whether it gets the larger type


@dataclass(frozen=True)
class Preset:
    """`more` is the type of attn_v and ffn_down in some layers, `head` of the output matrix (a tied embedding too)."""

    name: str
    type: str
    head: str
    file_type: str  # of gguf.LlamaFileType
    larger_type: str | None = None
    when: More = lambda layer, layers: False

    def type_of(self, tensor: str, shape: tuple[int, ...], tied: bool, layers: int) -> str:
        """The type of this tensor, by GGUF's name."""
        if len(shape) < 2 or not tensor.endswith(".weight"):
            return "F32"
        part = tensor.split(".")
        wanted = self.type
        if part[0] == "output" or (tied and part[0] == "token_embd"):
            wanted = self.head
        elif self.larger_type and part[-2] in ("attn_v", "ffn_down") and self.when(int(part[1]), layers):
            wanted = self.larger_type
        return _fitting(wanted, shape[-1])


def _fitting(kind: str, inputs: int) -> str:
    if kind in SMALLER and inputs % SUPER:
        kind = SMALLER[kind]
    return kind if kind in ("F16", "BF16", "F32") or inputs % BLOCK == 0 else "F16"


def _ends_and_thirds(layer: int, layers: int) -> bool:
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _first(layer: int, layers: int) -> bool:
    return layer < layers // 8


PRESETS = {
    each.name: each
    for each in (
        Preset("F32", "F32", "F32", "ALL_F32"),
        Preset("F16", "F16", "F16", "MOSTLY_F16"),
        Preset("BF16", "BF16", "BF16", "MOSTLY_BF16"),
        Preset("Q8_0", "Q8_0", "Q8_0", "MOSTLY_Q8_0"),
        *(Preset(name, name, "Q6_K", f"MOSTLY_{name}") for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1")),
        Preset("Q4_K_S", "Q4_K", "Q6_K", "MOSTLY_Q4_K_S", "Q5_K", _first),
        Preset("Q4_K_M", "Q4_K", "Q6_K", "MOSTLY_Q4_K_M", "Q6_K", _ends_and_thirds),
        Preset("Q5_K_S", "Q5_K", "Q6_K", "MOSTLY_Q5_K_S"),
        Preset("Q5_K_M", "Q5_K", "Q6_K", "MOSTLY_Q5_K_M", "Q6_K", _ends_and_thirds),
        Preset("Q6_K", "Q6_K", "Q6_K", "MOSTLY_Q6_K"),
    )
}
