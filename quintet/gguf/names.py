"""Maps GGUF's tensor names to our modules' names, by architecture, and describes how the tensors were changed."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

ENDS: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Of rotary positions, which the configuration is made of.
ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
PASSED_OVER = (*ROPE, "token_embd.img_break")  # the latter is a row of the text model's embedding


class Computed(NamedTuple):
    """A tensor of the model that is computed in floats from tensors of the file."""

    function: str  # in quintet.model_loader.gguf_tensors.FUNCTIONS
    sources: tuple[str, ...]  # names in the file, without the layer


class Joined(NamedTuple):
    """A matrix of the model whose rows are those of one or several matrices of the file, in another order."""

    sources: tuple[str, ...]  # names in the file, without the layer and without what is behind the last dot
    order: str = ""  # in quintet.model_loader.gguf_tensors.ROW_ORDERS; as they stand


@dataclass(frozen=True)
class ArchitectureNames:
    """An architecture's."""

    blocks: Mapping[str, str]  # of a layer: name in the file -> module
    ends: Mapping[str, str] = field(default_factory=lambda: ENDS)  # outside of the layers
    layers: str = "model.layers"
    permutes_qk: bool = False  # rows of q and k stand for rotations of neighbours: see unpermuted_rows()
    offset: float = 0.0  # what was added to the weights of norms
    transposed: tuple[str, ...] = ()  # ends of modules: [out, in] in GGUF, [in, out] in the model's own checkpoints
    computed: Mapping[str, Computed] = field(default_factory=dict)  # by the model's tensor; "/": outside of the layers
    joined: Mapping[str, Joined] = field(default_factory=dict)  # by the module
    biased_experts: bool = False  # the model has a place for a bias of each expert
    fused: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: FUSED
    )  # rows over one another: keys of `blocks`
    stated: Mapping[str, str] = field(default_factory=dict)  # of a layer: the model's tensor [1] -> key of the metadata

    def module(self, name: str) -> str | None:
        """Returns the module of a tensor's name without its last part; None: the model has no such module."""
        if name in self.ends:
            return self.ends[name]
        if expert := ALONE.fullmatch(name):
            return f"{self.layers}.{int(expert[1])}.mlp.experts.{int(expert[3])}.{expert[2]}_proj"
        block = BLOCK.fullmatch(name)
        if block is None or block[2] not in self.blocks:
            return None
        return f"{self.layers}.{int(block[1])}.{self.blocks[block[2]]}"

    def modules(self, name: str) -> tuple[str, ...]:
        """Returns a tensor's modules, in the order of its rows: several if the file joins what the model has apart."""
        block = BLOCK.fullmatch(name)
        apart = self.fused.get(block[2], ()) if block is not None and block[2] not in self.blocks else ()
        found = [self.module(f"blk.{block[1]}.{each}") for each in apart] if block is not None else []
        known = found or [self.module(name)]
        return tuple(each for each in known if each is not None)

    def joined_module(self, name: str) -> tuple[str, Joined] | None:
        """Returns the module that a tensor's rows are part of, by its name without the last part, and the rule."""
        block = BLOCK.fullmatch(name)
        found = self._joined_by_source.get(block[2]) if block is not None else None
        if block is None or found is None:
            return None
        return f"{self.layers}.{int(block[1])}.{found}", self.joined[found]

    def computed_tensors(self, name: str) -> tuple[str, ...]:
        """Returns the names of the tensors that one of the file's is a source of."""
        layer, own = layer_of(name)
        return tuple(self.model_name(each, layer) for each in self._computed_by_source.get(own, ()))

    def model_name(self, target: str, layer: int | None) -> str:
        """Returns the whole name of a key of `computed`, in this layer."""
        return target[1:] if target.startswith("/") else f"{self.layers}.{layer}.{target}"

    @functools.cached_property
    def _joined_by_source(self) -> Mapping[str, str]:
        return {source: module for module, rule in self.joined.items() for source in rule.sources}

    @functools.cached_property
    def _computed_by_source(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for target, rule in self.computed.items():
            for source in rule.sources:
                found.setdefault(source, []).append(target)
        return found


def layer_of(name: str) -> tuple[int | None, str]:
    """Returns the layer of a tensor in a file, or None, and its name without it."""
    block = BLOCK.fullmatch(name)
    return (None, name) if block is None else (int(block[1]), block[2])


# What llama.cpp's converter joins if asked (--fuse-qkv, --fuse-gate-up-exps): rows over one another.
FUSED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}
BLOCK = re.compile(r"blk\.(\d{1,5})\.([\w.]+)")
ALONE = re.compile(r"blk\.(\d{1,5})\.ffn_(gate|up|down)\.(\d{1,5})")  # an expert of the first files of Mixtral


def without_expert_number(module: str) -> str:
    """A module's name without the number of its expert."""
    return EXPERT.sub(".experts.", module)


EXPERT = re.compile(r"\.experts\.\d+\.")


def unpermuted_rows(rows: int, head_dim: int) -> list[int]:
    """Returns, for each row of q or k as the model has them, the row of the file.

    Rotations are of the features i and i + head_dim / 2 in the model, and of neighbours in the file. ValueError where
    the rows are no heads.
    """
    check_head_rows(rows, head_dim)
    half = head_dim // 2

    def place(feature: int) -> int:
        return feature % half * 2 + feature // half

    return [row - row % head_dim + place(row % head_dim) for row in range(rows)]


def check_head_rows(rows: int, head_dim: int) -> None:
    """ValueError where rows of q or k are no heads."""
    if head_dim < 2 or head_dim % 2 or rows % head_dim:
        raise ValueError(
            f"{rows} rows of queries or keys are no heads of {head_dim} features, in pairs; fetch it again"
        )
