"""A fused tensor in which shares of its outputs take turns, and weights that are kept around another number."""

from typing import Any

import pytest
import torch

from quintet.interface.platform import SingleRank
from quintet.interface.weights import PLAIN, CheckpointSlice, ShardRange, Weight, WeightFormat
from quintet.layers.build import BuildContext, even_shards
from quintet.layers.layer_state import LayerMixer
from quintet.layers.linear import CheckpointLayout, ColumnParallelLinear, column_parallel
from quintet.ops import bind
from quintet.quantize.targets import UnusedMixer

ROWS = torch.arange(12.0)[:, None].expand(12, 3)  # each row says which it is


class Second(SingleRank):
    """Of two ranks."""

    rank, size = 1, 2  # type: ignore[assignment]


def linear(stored: CheckpointLayout, comm: SingleRank | None = None, forms: Any = None) -> ColumnParallelLinear:
    """q of 6 features, k and v of 3 each."""
    settings = {} if forms is None else {"quantization": forms}
    build = BuildContext(
        bind({}), lambda spec: LayerMixer(UnusedMixer()), comm or SingleRank(), torch.float32, 16, 64, **settings
    )
    sizes = {"q": 6, "k": 3, "v": 3}
    return column_parallel(
        build, 3, {name: even_shards(size, build.size) for name, size in sizes.items()}, stored=stored
    )


def kept(layer: ColumnParallelLinear) -> list[int]:
    """The rows that the rank keeps, in order."""
    (weight,) = layer.weights("attention.qkv")
    rows: list[int] = weight.local({"attention.fused.weight": ROWS})[:, 0].int().tolist()
    return rows


def test_strips_come_apart_into_their_outputs() -> None:
    """Three times two rows of q, one of k and one of v."""
    assert kept(linear(CheckpointLayout(fused="fused", num_strips=3))) == [0, 1, 4, 5, 8, 9, 2, 6, 10, 3, 7, 11]


def test_strips_may_hold_outputs_in_another_order() -> None:
    assert kept(linear(CheckpointLayout(fused="fused", num_strips=3, order=(0, 2, 1))))[6:] == [3, 7, 11, 2, 6, 10]


def test_a_rank_keeps_its_share_of_each_output() -> None:
    assert kept(linear(CheckpointLayout(fused="fused", num_strips=3), Second())) == [5, 8, 9, 6, 10, 7, 11]


class Packed:
    """Forms of a checkpoint that holds everything quantized."""

    def __init__(self, fmt: WeightFormat) -> None:
        self._form = fmt

    def reader(self, module: str) -> Any:
        return self

    def format_for(self, module: str, shard: ShardRange) -> Any:
        return self._form, self


@pytest.mark.parametrize(("comm", "kept"), [(SingleRank(), [[0, 2], [4, 6], [8, 10]]), (Second(), [[5, 6], [8, 10]])])
def test_a_quantized_tensor_is_cut_strip_by_strip(comm: SingleRank, kept: list[list[int]]) -> None:
    """q's two rows of each strip, as far as the rank has them."""
    layer = linear(CheckpointLayout(fused="fused", num_strips=3), comm, Packed(PLAIN))
    layer.finalize("attention.qkv")
    (weight,) = layer.weights("attention.qkv")
    cuts = [weight.shard(part).outputs for part in weight.slices if part.shape[0] == 2]
    assert [list(each) for each in cuts] == kept and {part.num_strips for part in weight.slices} == {0}
    assert weight.shape == (12 if comm.size == 1 else 7, 3)


def test_a_quantized_tensor_in_strips_and_in_another_order_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"attention\.fused is quantized with its inputs in another order"):
        linear(
            CheckpointLayout(fused="fused", num_strips=3), forms=Packed(WeightFormat("int4", 4, act_order=True))
        ).finalize("attention.qkv")


def test_what_a_norm_keeps_around_0_is_shifted() -> None:
    part = CheckpointSlice("norm.weight", (2,), ((0, 2),), shift=1.0)
    weight = Weight("weight", (part,), 0, 0, torch.float32, "vector")
    assert weight.local({"norm.weight": torch.tensor([0.0, -0.5])}).tolist() == [1.0, 0.5]
