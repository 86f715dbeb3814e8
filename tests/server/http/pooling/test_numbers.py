"""Numbers are written as torch and Cohere write them."""

import base64
import json

import numpy as np
import pytest
import torch

from quintet.server.http.pooling.encoding_format import DTYPES, NumberFormat, cohere_json

TORCH = dict(
    zip(
        DTYPES,
        (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        strict=True,
    )
)


def _hard() -> torch.Tensor:
    """All sizes, each float8 and what lies half way between two, both zeros."""
    every = torch.arange(256, dtype=torch.uint8)
    exact = torch.cat([every.view(torch.float8_e4m3fn).float(), every.view(torch.float8_e5m2).float()])
    exact = exact[exact.isfinite()].sort().values
    half = (exact[1:] + exact[:-1]) / 2
    near = torch.cat([half, torch.nextafter(half, exact[1:]), torch.nextafter(half, exact[:-1])])
    large = torch.tensor([463.0, 464.0, 465.0, 479.0, 480.0, 61439.0, 61440.0, 65504.0, 65520.0, 1e30, -1e30, -0.0])
    return torch.cat([exact, near, large, torch.randn(4096), torch.randn(64) * 1e-8])


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_type_has_torchs_bits(dtype: str) -> None:
    x = _hard()
    theirs = x.to(TORCH[dtype]).view(torch.uint8).numpy().tobytes()
    ours = NumberFormat("bytes", dtype, "little").raw(x.numpy())
    if dtype.startswith("fp8"):
        pairs = [(float(v), a, b) for v, a, b in zip(x, ours, theirs, strict=True) if a != b]
        assert not pairs, pairs[:5]
    assert ours == theirs


def test_big_endian_turns_each_number() -> None:
    x = np.asarray([1.5, -2.25], np.float32)
    assert NumberFormat("bytes", "float32", "big").raw(x) == x.astype(">f4").tobytes()
    assert NumberFormat("bytes", "bfloat16", "big").raw(x)[::-1] == NumberFormat("bytes", "bfloat16", "little").raw(
        x[::-1]
    )


def test_json_holds_each_float32_exactly() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    assert (np.asarray(json.loads(bytes(NumberFormat().json(x))), np.float32) == x).all()
    packed = json.loads(bytes(NumberFormat("base64").json(x)))
    assert (np.frombuffer(base64.b64decode(packed), np.float32) == x.reshape(-1)).all()


def test_cohere_types() -> None:
    x = np.asarray([1.0, -1.0, 0.5, -0.25, 0.0, -0.0, 0.1, -0.1], np.float32)
    assert json.loads(bytes(cohere_json(x, "int8"))) == [127, -127, 64, -32, 0, 0, 13, -13]
    assert json.loads(bytes(cohere_json(x, "uint8"))) == [255, 1, 192, 96, 128, 128, 141, 115]
    assert json.loads(bytes(cohere_json(x, "ubinary"))) == [0b10101110]
    assert json.loads(bytes(cohere_json(x, "binary"))) == [0b10101110 - 128]
    with pytest.raises(ValueError, match="packs 8 numbers into a byte, and the embedding has 7"):
        cohere_json(x[:7], "binary")
