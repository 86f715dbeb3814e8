"""Norms of heads with weights of their own, against torch's formulas."""

import pytest
import torch

from quintet.interface.platform import SingleRank
from quintet.layers.build import BuildContext, even_shards
from quintet.layers.layer_state import LayerMixer
from quintet.layers.norm import HeadLayerNorm
from quintet.layers.ssm.plamo import HeadRMSNorm
from quintet.ops import bind
from quintet.quantize.targets import UnusedMixer

HEADS, WIDTH = 3, 4


@pytest.mark.parametrize("kind", [HeadLayerNorm, HeadRMSNorm])
def test_each_head_is_normed_and_has_its_own_weight(kind: type[HeadLayerNorm]) -> None:
    build = BuildContext(bind({}), lambda spec: LayerMixer(UnusedMixer()), SingleRank(), torch.float32, 16, 64)
    made = kind(build, even_shards(HEADS, 1), WIDTH, 1e-5)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((5, HEADS, WIDTH), (HEADS, WIDTH)))
    made.weight, made.ones = weight.flatten(), made.constants()["ones"]
    norm = torch.nn.functional.rms_norm if kind is HeadRMSNorm else torch.nn.functional.layer_norm
    torch.testing.assert_close(made(x), norm(x, (WIDTH,), eps=1e-5) * weight)
