"""Hyper-connections against those of transformers: HY V4's, GLM-5-Next's and DeepSeek-V4's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.hy_v4 import modeling_hy_v4 as hy

from quintet.interface.platform import SingleRank
from quintet.layers.build import BuildContext
from quintet.layers.hyper_connection import HyperConnection, HyperConnectionSizes, HyperHead, MeanHead, StreamGates
from quintet.layers.layer_state import LayerMixer
from quintet.ops import bind
from quintet.quantize.targets import UnusedMixer

HIDDEN, STREAMS, TOKENS = 48, 4, 33
BASE = {"model_type": "tiny", "hidden_size": HIDDEN, "hc_mult": STREAMS, "hc_eps": 1e-3, "rms_norm_eps": 1e-5}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "HY V4": (hy.HYV4HyperConnection, {"hc_magnitude": 1.7}),
    "GLM-5-Next": (glm.Glm5NextTextHyperConnection, {"hc_sinkhorn_iters": 20}),
    "DeepSeek-V4": (deepseek.DeepseekV4HyperConnection, {"hc_sinkhorn_iters": 3}),
}


def build() -> BuildContext:
    return BuildContext(bind({}), lambda spec: LayerMixer(UnusedMixer()), SingleRank(), torch.float32, 16, 64)


def filled(layer: StreamGates, theirs: nn.Module, prefix: str = "") -> None:
    """Gives a module of transformers random numbers, and the layer the same."""
    names = {weight.slices[0].source.removeprefix("hc."): weight.name for weight in layer.weights("hc")}
    assert set(names) == {f"{prefix}{name}" for name in ("fn", "base", "scale")}
    for tensor in theirs.parameters():
        tensor.data = torch.randn(tensor.shape) * (0.3 if tensor.dim() > 1 else 1.0)
    layer.assign({own: dict(theirs.named_parameters())[name].data for name, own in names.items()})
    layer.norm.assign(layer.norm.constants())


def streams(dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(TOKENS, STREAMS, HIDDEN) * 2).to(dtype)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_branch_reads_and_writes_streams_as_in_transformers(name: str) -> None:
    torch.manual_seed(0)
    kind, more = CONFIGS[name]
    config = SimpleNamespace(**BASE, **more)
    theirs, layer = kind(config), HyperConnection(build(), HyperConnectionSizes.from_config(config))
    filled(layer, theirs)
    x, output = streams(), torch.randn(TOKENS, HIDDEN)
    post, *matrix, collapsed = theirs(x[None])
    want = post[0, :, :, None] * output[:, None]
    want = want + (matrix[0][0].transpose(-1, -2) @ x if matrix else x)
    one, gates = layer.collapse(x.flatten(1))
    torch.testing.assert_close(one, collapsed[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.expand(x.flatten(1), output, gates), want.flatten(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [hy.HYV4HyperHead, deepseek.DeepseekV4HyperHead])
def test_a_head_joins_streams_as_in_transformers(kind: Any) -> None:
    torch.manual_seed(0)
    config = SimpleNamespace(**BASE)
    theirs, layer = kind(config), HyperHead(build(), HyperConnectionSizes.from_config(config))
    filled(layer, theirs, "hc_")
    x = streams()
    torch.testing.assert_close(layer(x.flatten(1)), theirs(x[None])[0], rtol=1e-5, atol=1e-5)


def test_a_head_without_weights_is_the_mean() -> None:
    layer, x = MeanHead(build(), HyperConnectionSizes.from_config(SimpleNamespace(**BASE))), streams(torch.bfloat16)
    layer.assign(layer.constants())
    assert torch.equal(layer(x.flatten(1)), glm.Glm5NextTextHyperHead()(x[None])[0])


def test_no_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="hc_mult 0 has no stream"):
        HyperConnectionSizes.from_config(SimpleNamespace(**{**BASE, "hc_mult": 0}))
