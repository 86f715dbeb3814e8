"""Rotary tables: the frequencies of each scaling that checkpoints name, fixed for the engine's longest request.

A table must not depend on how long a request happens to be, or cached keys would be turned by another angle than new
ones. `dynamic` and `longrope`, which peers switch by current length, are therefore switched by max_model_len.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.types import HeadNorms, RotaryArgs
from quintet.layers.build import BuildContext, Layer
from quintet.layers.norm import RMSNorm

Parameters = Mapping[str, Any]


@dataclass(frozen=True)
class RopeLengths:
    """Lengths in tokens that a scaling depends on."""

    trained: int  # max_position_embeddings
    served: int  # max_model_len


class Rotary(Layer):
    """One table of cosines and sines, shared by the layers that turn alike.

    With `partial`, for families that turn the first part of a head where the checkpoint says so; with `interleaved`,
    for those that pair features 2 i and 2 i + 1 instead of the halves.
    """

    def __init__(
        self,
        build: BuildContext,
        head_dim: int,
        parameters: Parameters,
        trained: int,
        partial: bool = False,
        interleaved: bool = False,
    ) -> None:
        super().__init__(build, *(("pair_rotary",) if interleaved else ("rotary", "norm_rotary")))
        self.interleaved = interleaved
        self.dim = rotary_dim(head_dim, parameters, partial)  # channels of a head that turn
        self._scaling = dict(parameters)  # not _parameters: that is nn.Module's own
        self._lengths = RopeLengths(trained, build.max_model_len)
        frequencies(self.dim, self._scaling, self._lengths)  # refuses what it cannot compute, before a weight is read
        self.table: Tensor
        self.axes: tuple[int, ...] = ()  # of three positions of a token, which turns each frequency (M-RoPE)

    @classmethod
    def from_config(
        cls, build: BuildContext, config: Any, partial: bool = False, interleaved: bool = False
    ) -> "Rotary":
        """Makes the table of a model in which all layers turn alike."""
        trained = config.max_position_embeddings
        made = cls(build, head_dim(config), config.rope_parameters, trained, partial, interleaved)
        made.axes = multimodal_axes(config.model_type, config.rope_parameters, made.dim // 2)
        return made

    def longest_angles(self) -> tuple[Tensor, float]:
        """Returns the angle of each pair of channels at the end of the longest request, in rad, and the factor of
        cosines and sines."""
        waves, factor = frequencies(self.dim, self._scaling, self._lengths)
        return waves * self._lengths.served, factor

    def constants(self) -> dict[str, Tensor]:
        return {"table": rotary_table(self.dim, self._scaling, self._lengths)}

    def forward(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`table`: in the place of its own."""
        turn = self.ops.pair_rotary if self.interleaved else self.ops.rotary
        turned: tuple[Tensor, Tensor] = turn(q, k, self.table if table is None else table, positions)
        return turned

    def norm_and_rotate(
        self, q: Tensor, k: Tensor, norms: tuple[RMSNorm, RMSNorm], positions: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """q and k turned after each head went through its norm: one op for both."""
        of_q, of_k = norms
        if self.interleaved:
            return self(of_q(q), of_k(k), positions, table)
        angles = self.table if table is None else table
        turned: tuple[Tensor, Tensor] = self.ops.norm_rotary(q, k, _head_norms(of_q, of_k), angles, positions)
        return turned

    def multimodal_table(self, positions: Tensor) -> Tensor:
        """Returns a table with a row for each token of a step, [T, dim], of their three positions [3, T]."""
        rows = self.table[positions.long()]
        axes = torch.tensor(self.axes * 2, device=rows.device)
        found = rows[0]
        for axis in (1, 2):
            found = torch.where(axes == axis, rows[axis], found)
        return found.contiguous()

    def rotary_args(self, of_q: nn.Module | None, of_k: nn.Module | None) -> RotaryArgs | None:
        """Returns the rotary arguments for a kernel that does more than turn; None where no one op does all of it."""
        if of_q is None or of_k is None:
            return RotaryArgs(self.table, None, self.interleaved)
        if self.interleaved or not (isinstance(of_q, RMSNorm) and isinstance(of_k, RMSNorm)):
            return None
        return RotaryArgs(self.table, _head_norms(of_q, of_k))


def _head_norms(of_q: RMSNorm, of_k: RMSNorm) -> HeadNorms:
    return HeadNorms(of_q.weight, of_k.weight, of_q.eps, of_q.offset)


class PositionScaling(Layer):
    """A factor for each position: 1 + beta log(1 + floor((position + shift) / first)), as in Llama 4."""

    def __init__(self, build: BuildContext, beta: float, first: int, shift: int = 0) -> None:
        super().__init__(build, "take_rows", "scale_rows")
        self._served, self._beta, self._first, self._shift = build.max_model_len, beta, first, shift
        self.table: Tensor

    def constants(self) -> dict[str, Tensor]:
        places = torch.arange(self._served, dtype=torch.float32) + self._shift
        steps = torch.div(places, self._first, rounding_mode="floor")
        return {"table": (1 + self._beta * torch.log1p(steps))[:, None]}

    def forward(self, q: Tensor, positions: Tensor) -> Tensor:
        """q [T, H, D], times the factors of its positions."""
        grown: Tensor = self.ops.scale_rows(q.flatten(1), self.ops.take_rows(self.table, positions))
        return grown.reshape(q.shape)


# sections of the frequencies of text models with three positions, where config.json has none; those of the first take
# turns among the positions, frequency by frequency
_ALTERNATING = {
    "qwen3_vl_text": (24, 20, 20), "qwen3_vl_moe_text": (24, 20, 20), "qwen3_5_text": (11, 11, 10),
    "qwen3_5_moe_text": (11, 11, 10), "qwen3_omni_moe_text": (24, 20, 20),
}  # fmt: skip
_SECTIONS = {**_ALTERNATING, **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text"), (8, 12, 12))}


def multimodal_axes(model_type: str, parameters: Parameters, count: int) -> tuple[int, ...]:
    """Returns which of three positions of a token (time, height, width) turns each of `count` frequencies; empty where
    a token has one position."""
    alternating = model_type in _ALTERNATING
    sections = parameters.get("mrope_section") or _SECTIONS.get(model_type)
    if not sections or len(sections) != 3:
        return ()
    if alternating:
        return tuple(at % 3 if at < 3 * sections[at % 3] else 0 for at in range(count))
    axes = tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    return axes if len(axes) == count else ()


def head_dim(config: Any) -> int:
    """Features per head: from the checkpoint, or the hidden size shared out evenly."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotary_dim(head_dim: int, parameters: Parameters, partial: bool) -> int:
    """Features of a head that are turned; ValueError where they cannot be.

    Families that turn whole heads ignore a partial_rotary_factor, as transformers does. With a scaling it
    fails there, so what such a checkpoint means is not known.
    """
    factor, kind = parameters.get("partial_rotary_factor") or 1.0, _kind(parameters)
    dim = int(head_dim * factor)
    if not partial:
        if dim != head_dim and kind not in ("default", "proportional"):
            raise ValueError(
                f"partial_rotary_factor is {factor} beside rope_type {kind!r}, in a family that turns whole heads; "
                "correct config.json, or leave the factor out with hf_overrides"
            )
        dim = head_dim
    if dim < 1 or (dim % 2 and dim == head_dim):  # of a part that is odd, one more is turned, as in transformers
        raise ValueError(
            f"{dim} features of each head are turned (head_dim {head_dim}, partial_rotary_factor {factor}), and rotary "
            "positions turn pairs; correct head_dim, or hidden_size and num_attention_heads, in config.json"
        )
    return dim


def rotary_table(dim: int, parameters: Parameters, lengths: RopeLengths) -> Tensor:
    """[extent.served, dim] float32: dim/2 cosines, then dim/2 sines; an odd dim is rounded up."""
    waves, scale = frequencies(dim, parameters, lengths)
    angles = torch.arange(lengths.served, dtype=torch.float32)[:, None] * waves[None, :]
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1)


def frequencies(dim: int, parameters: Parameters, lengths: RopeLengths) -> tuple[Tensor, float]:
    """dim/2 angles per position, and what cosines and sines are multiplied by; ValueError if these make no numbers."""
    kind = _kind(parameters)
    if kind not in SCALINGS:
        raise ValueError(f"rope_type {kind!r} is not known; quintet has {', '.join(sorted(SCALINGS))}")
    wrong = f"rope_type {kind!r} cannot be computed of {reprlib.repr(dict(parameters))}"
    try:
        waves, scale = SCALINGS[kind](dim, parameters, lengths)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:  # RuntimeError is torch's
        reason = " ".join(repr(error).split())[:200]
        raise ValueError(f"{wrong} ({reason}); correct rope_parameters in config.json") from error
    if waves.shape != (-(-dim // 2),) or not waves.isfinite().all() or not math.isfinite(scale):
        raise ValueError(f"{wrong}: not {-(-dim // 2)} finite frequencies; correct rope_parameters in config.json")
    return waves, scale


def _kind(parameters: Parameters) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _inverse_frequencies(dim: int, base: float) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _default(dim: int, p: Parameters, lengths: RopeLengths) -> tuple[Tensor, float]:
    return _inverse_frequencies(dim, p["rope_theta"]), 1.0


def _linear(dim: int, p: Parameters, lengths: RopeLengths) -> tuple[Tensor, float]:
    """Positions divided by the factor (Chen et al. 2023)."""
    return _inverse_frequencies(dim, p["rope_theta"]) / p["factor"], 1.0


def _dynamic(dim: int, p: Parameters, lengths: RopeLengths) -> tuple[Tensor, float]:
    """NTK-aware base, stretched for the longest request that is served."""
    longest = max(lengths.served, lengths.trained)
    stretch = p["factor"] * longest / lengths.trained - (p["factor"] - 1)
    return _inverse_frequencies(dim, p["rope_theta"] * stretch ** (dim / (dim - 2))), 1.0


def _ntk(dim: int, p: Parameters, lengths: RopeLengths) -> tuple[Tensor, float]:
    """NTK-aware base at a fixed factor, or, with mixed_b, one divisor for each frequency (Su 2023)."""
    factor, mixed = p["factor"], p.get("mixed_b")
    if mixed is None:
        return _inverse_frequencies(dim, p["rope_theta"] * factor) / factor ** (2 / dim), 1.0
    steps = torch.arange(1, dim // 2 + 1, dtype=torch.float32) ** mixed
    return _inverse_frequencies(dim, p["rope_theta"]) / (math.log(factor) / (dim / 2) ** mixed * steps).exp(), 1.0


def _llama3(dim: int, p: Parameters, lengths: RopeLengths) -> tuple[Tensor, float]:
    """Long waves divided by the factor, short ones kept, a ramp between (Llama 3.1)."""
    frequencies = _inverse_frequencies(dim, p["rope_theta"])
    low, high, context = p["low_freq_factor"], p["high_freq_factor"], p["original_max_position_embeddings"]
    smooth = ((context * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / p["factor"] + smooth * frequencies, 1.0


def _yarn(dim: int, p: Parameters, lengths: RopeLengths) -> tuple[Tensor, float]:
    """Interpolation by parts and a temperature on the scores (Peng et al. 2023)."""
    base, context = p["rope_theta"], p["original_max_position_embeddings"]
    factor = p.get("factor") or lengths.trained / context

    def turns_at(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = turns_at(p.get("beta_fast") or 32), turns_at(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low or 0.001)).clamp(0, 1)
    frequencies = _inverse_frequencies(dim, base)
    return frequencies / factor * ramp + frequencies * (1 - ramp), _yarn_scale(p, factor)


def _yarn_scale(p: Parameters, factor: float) -> float:
    def mscale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
    return mscale(1.0)


def _longrope(dim: int, p: Parameters, lengths: RopeLengths) -> tuple[Tensor, float]:
    """One divisor per frequency, from a short or a long list (Ding et al. 2024)."""
    context = p["original_max_position_embeddings"]
    factor = p.get("factor") or lengths.trained / context
    scale = p.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    divisors = torch.tensor(p["long_factor" if lengths.served > context else "short_factor"], dtype=torch.float32)
    return _inverse_frequencies(dim, p["rope_theta"]) / divisors, float(scale)


def _proportional(dim: int, p: Parameters, lengths: RopeLengths) -> tuple[Tensor, float]:
    """The first frequencies of a whole head, and 0 behind them (Gemma 4, LFM3)."""
    waves, turned = _inverse_frequencies(dim, p["rope_theta"]), int((p.get("partial_rotary_factor") or 1.0) * dim // 2)
    return torch.where(torch.arange(dim // 2) < turned, waves, 0.0) / (p.get("factor") or 1.0), 1.0


SCALINGS: dict[str, Callable[[int, Parameters, RopeLengths], tuple[Tensor, float]]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "ntk": _ntk,
    "proportional": _proportional,
    "yarn": _yarn,
}
