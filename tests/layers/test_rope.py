"""Every rope scaling's table against transformers' frequencies, within and beyond the trained length."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quintet.layers.rope import SCALINGS, RopeLengths, rotary_table

TRAINED = 512
DIM = 24

LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 128,
    "short_factor": [1.0 + 0.1 * i for i in range(DIM // 2)],
    "long_factor": [2.0 + 1.7 * i for i in range(DIM // 2)],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3, narrow ramp": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.5, "factor": 32.0},
    "yarn": YARN,
    "yarn, betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn, attention factor": {**YARN, "attention_factor": 1.25},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, untruncated": {**YARN, "truncate": False},
    "yarn, no ramp": {**YARN, "beta_fast": 1e9, "beta_slow": 1e9},
    "yarn, shrunk": {**YARN, "factor": 1.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "proportional, factor": {"rope_type": "proportional", "partial_rotary_factor": 0.75, "factor": 2.0},
    "longrope": LONGROPE,
    "longrope, factor": {**LONGROPE, "factor": 16.0},
    "longrope, attention factor": {**LONGROPE, "attention_factor": 1.1},
}


def expected(parameters: dict[str, Any], served: int, theta: float) -> Tensor:
    config = LlamaConfig(
        hidden_size=2 * DIM,
        num_attention_heads=2,
        head_dim=DIM,
        max_position_embeddings=TRAINED,
        rope_parameters={**parameters, "rope_theta": theta},
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=served)
    angles = torch.arange(served, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1) * scale


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("served", [100, 300, TRAINED, 900])
@pytest.mark.parametrize("case", CASES)
def test_table_equals_transformers(case: str, served: int, theta: float) -> None:
    table = rotary_table(DIM, {**CASES[case], "rope_theta": theta}, RopeLengths(TRAINED, served))
    assert table.shape == (served, DIM)
    assert table.dtype == torch.float32
    # an angle of `served` radians is itself only known to served * 2**-24
    torch.testing.assert_close(table, expected(CASES[case], served, theta), rtol=0, atol=4e-7 * served)


def test_default_is_the_papers() -> None:
    table = rotary_table(4, {"rope_type": "default", "rope_theta": 100.0}, RopeLengths(TRAINED, 3))
    want = [[math.cos(p), math.cos(p / 10), math.sin(p), math.sin(p / 10)] for p in range(3)]
    torch.testing.assert_close(table, torch.tensor(want))


def test_every_scaling_is_covered() -> None:
    assert {case["rope_type"] for case in CASES.values()} | {"ntk"} == set(SCALINGS) - {"default"}


@pytest.mark.parametrize("mixed", [None, 0.6])
def test_ntk_is_what_gtes_code_computes(mixed: float | None) -> None:
    """transformers has none: the base grows by the factor, and all waves by its root; or each wave by its own share."""
    said = {"rope_type": "ntk", "rope_theta": 1e4, "factor": 8.0, **({"mixed_b": mixed} if mixed else {})}
    table = rotary_table(4, said, RopeLengths(TRAINED, 3))
    root = 8.0 ** (2 / 4)
    waves = [1 / root, (1e4 * 8.0) ** -0.5 / root]
    if mixed is not None:
        share = math.log(8.0) / 2**mixed
        waves = [math.exp(-share), 1e-2 * math.exp(-share * 2**mixed)]
    want = [[turn(place * wave) for turn in (math.cos, math.sin) for wave in waves] for place in range(3)]
    torch.testing.assert_close(table, torch.tensor(want))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_switched_by_what_is_served(kind: str) -> None:
    """Not by a request's own length: its cached keys would be turned by another angle than its new ones."""
    parameters = {**CASES[kind], "rope_theta": 1e4}
    short, long = (rotary_table(DIM, parameters, RopeLengths(TRAINED, served)) for served in (100, 1000))
    assert not torch.allclose(short, long[:100], atol=1e-3)


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="rope_type 'spiral' is not known; quintet has default, dynamic"):
        rotary_table(DIM, {"rope_type": "spiral"}, RopeLengths(TRAINED, 8))
