"""Short convolutions over each request's last few tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.types import StateSpec
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, Layer, Shards, even_shards
from quintet.layers.layer_state import StepState
from quintet.layers.linear import CheckpointLayout, column_parallel, row_parallel
from quintet.ops.states import ConvWeights


def check_silu(config: Any, entry: str = "hidden_act") -> None:
    """ValueError if what follows a model's convolutions is another activation than the one that is computed here."""
    if (activation := getattr(config, entry)) not in ("silu", "swish"):
        raise ValueError(
            f"{config.model_type} with {entry}={activation!r} is not supported: silu follows its convolutions"
        )


class ShortConv(Layer):
    """x [T, C] -> [T, C], C being this rank's channels; `splits` share out those of the checkpoint's one tensor.

    The tensor [channels, 1, K], and its bias, have the name of the module; with `sources` each split has a tensor of
    such a name beside it.
    """

    def __init__(
        self,
        build: BuildContext,
        splits: Sequence[Shards],
        conv_kernel: int,
        bias: bool = False,
        silu: bool = False,
        sources: Sequence[str] = (),
    ) -> None:
        super().__init__(build)
        self._build, self._splits, self._sources = build, splits, sources
        self._conv_kernel, self._has_bias, self._silu = conv_kernel, bias, silu
        self._channel_count = sum(split.local(build.rank) for split in splits)
        self._make_mixing()
        self.weight: Tensor  # [C, 1, K]
        self.bias: Tensor | None = None

    def _make_mixing(self) -> None:
        shape = self._channel_count, self._conv_kernel - 1
        self.mixing = self._build.make_mixer(StateSpec("short_conv", shape, self._build.dtype))

    def weights(self, path: str) -> list[Weight]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (1, self._conv_kernel)}
        if self._has_bias:
            shapes["bias"] = ()
        return [self._channels(path, name, rest) for name, rest in shapes.items()]

    def _channels(self, path: str, name: str, rest: tuple[int, ...]) -> Weight:
        total, offset, parts = sum(split.total for split in self._splits), 0, []
        for source, split in zip(self._sources, self._splits, strict=bool(self._sources)):
            parts.append(
                CheckpointSlice(f"{path.rpartition('.')[0]}.{source}.{name}", (split.total, *rest), split.ranges)
            )
        for split in self._splits if not parts else ():
            parts.append(CheckpointSlice(f"{path}.{name}", (split.total, *rest), split.ranges, offset, total=total))
            offset += split.total
        return Weight(name, tuple(parts), 0, self._build.rank, self._build.dtype, "channels")

    def forward(self, x: Tensor, cache: StepState, gates: Tensor | None = None) -> Tensor:
        """`gates` [T, 2 C]: factors before and after."""
        conv = ConvWeights(self.weight[:, 0], self.bias)
        return self.mixing.run_state_op(cache, x, gates, conv, settings=(self._silu,))


class CenteredConv(ShortConv):
    """The same over the tokens around each one, of requests that are whole in a step: nothing is kept. Its model is not
    `recordable`."""

    def _make_mixing(self) -> None:
        """Keeps nothing."""

    def forward(self, x: Tensor, cache: StepState, gates: Tensor | None = None) -> Tensor:
        assert gates is not None and not self._silu, "LFM2's convolution"
        before, after = gates.chunk(2, dim=-1)
        batch, rows, taken = cache.batch, torch.arange(len(x), device=x.device), (before * x).float()
        total = torch.zeros_like(taken)
        for tap in range(self._conv_kernel):
            places = rows + tap - self._conv_kernel // 2
            near = places.clamp(0, len(x) - 1)
            same = (places == near) & (near < batch.query_start_loc[-1])  # padding belongs to the last request
            same = same & (batch.token_to_seq[near] == batch.token_to_seq)
            total += taken[near] * same[:, None] * self.weight[:, 0, tap].float()
        total = total if self.bias is None else total + self.bias.float()
        return after * total.to(x.dtype)


class GatedConv(nn.Module):
    """LFM2's operator: x [T, hidden] -> out(C * conv(B * x')), where B, C and x' are projections of x."""

    def __init__(self, build: BuildContext, config: Any) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.conv_bias
        share = even_shards(hidden, build.size)
        parts = dict.fromkeys(("before", "after", "taken"), share)
        self.in_proj = column_parallel(build, hidden, parts, bias, CheckpointLayout(fused="in_proj"))
        kind = ShortConv if build.causal else CenteredConv
        self.conv = kind(build, [share], config.conv_L_cache, bias)
        self.out_proj = row_parallel(build, share, ("out_proj", hidden), bias)
        self._width = share.local(build.rank)

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        gates, taken = self.in_proj(x).split([2 * self._width, self._width], dim=-1)
        out: Tensor = self.out_proj(self.conv(taken, cache, gates))
        return out
