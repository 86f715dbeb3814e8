"""Scales of K and V that are computed from a first prompt."""

import torch

from quintet.interface.platform import SingleRank
from quintet.layers.attention.kv_scales import KVScales
from quintet.layers.build import BuildContext, KVScaling, even_shards
from quintet.layers.layer_state import LayerMixer
from quintet.ops import bind
from quintet.quantize.targets import UnusedMixer


def test_computed_scales_bring_the_largest_number_of_each_head_to_half_of_the_caches() -> None:
    scaling = KVScaling(computed=True)
    mixer, comm = (lambda spec: LayerMixer(UnusedMixer())), SingleRank()
    layer = KVScales(BuildContext(bind({}), mixer, comm, torch.float32, 16, 64, kv_scales=scaling), even_shards(2, 1))
    before = layer.constants()
    assert sorted(before) == ["k", "k_inverse", "v", "v_inverse"]
    assert all(torch.equal(each, torch.ones(2, 1)) for each in before.values()), "a number of each head"
    layer.peaks = {}
    for factor in (1.0, 3.0, 2.0):
        k = torch.tensor([[[0.5, -1.25], [7.0, 0.0]]]) * factor
        layer._observe(k, -2 * k)
    scales = layer.compute_scales(448.0)
    torch.testing.assert_close(scales["k"], torch.tensor([[3.75], [21.0]]) * 2 / 448)
    torch.testing.assert_close(scales["v"], torch.tensor([[7.5], [42.0]]) * 2 / 448)
    torch.testing.assert_close(scales["k_inverse"] * scales["k"], torch.ones(2, 1))
    assert layer.peaks is None
    assert torch.equal(layer.constants()["v"], scales["v"])
