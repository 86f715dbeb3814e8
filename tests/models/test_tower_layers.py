"""Our layers in the places of those of transformers' towers."""

import pytest
import torch
from torch import nn

from quintet.interface.platform import SingleRank
from quintet.layers.build import BuildContext
from quintet.layers.layer_state import LayerMixer
from quintet.models.transformers.tower_layers import PatchLinear, replace_layers, with_flat_kernels
from quintet.ops import bind
from quintet.quantize.targets import UnusedMixer

CONVOLUTIONS = {
    "flat": (nn.Conv2d(3, 8, 7, 7), (2, 3, 30, 21)),  # two rows are left over
    "wide": (nn.Conv2d(3, 8, (2, 5), (2, 5), bias=False, padding="valid"), (1, 3, 8, 10)),
    "frames": (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=False), (5, 3, 2, 4, 4)),
}
OTHERS = (nn.Conv2d(3, 8, 3, 1), nn.Conv2d(3, 8, 2, 2, padding=1), nn.Conv2d(4, 8, 2, 2, groups=2), nn.Conv1d(3, 8, 3))


def build() -> BuildContext:
    return BuildContext(bind({}), lambda spec: LayerMixer(UnusedMixer()), SingleRank(), torch.float32, 16, 64)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_of_patches_is_a_product(name: str) -> None:
    convolution, shape = CONVOLUTIONS[name]
    tower = nn.Sequential(convolution)
    patches = replace_layers(tower, build(), [])
    layer = tower[0]
    assert isinstance(layer, PatchLinear) and list(patches) == ["0.weight"]
    layer.finalize("0")
    layer.assign({key: value.detach().reshape(8, -1).squeeze(1) for key, value in convolution.named_parameters()})
    x = torch.randn(shape)
    torch.testing.assert_close(layer(x), convolution(x))


def test_other_convolutions_and_what_stays_in_float32_are_left() -> None:
    tower = nn.Sequential(*OTHERS, nn.Linear(4, 4))
    assert not replace_layers(tower, build(), ["4"])
    assert [*tower] == [*OTHERS, tower[4]] and type(tower[4]) is nn.Linear


def test_a_kernel_of_another_size_is_left_for_the_loader_to_refuse() -> None:
    kernels, other = torch.randn(8, 3, 7, 7), torch.randn(8, 3, 5, 5)
    found = with_flat_kernels({"a.weight": kernels, "b.weight": other}, {"a.weight": 147, "b.weight": 147})
    assert found["b.weight"] is other and found["a.weight"].shape == (8, 147)
