"""Products that share no accumulator, for compute capability 10.0: two in one loop are wrong there with Triton up to
3.7 (triton #10821, from 64 rows on)."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import quintet.platforms.gpu.ops.quantized as provider
from quintet.interface.weights import WeightFormat
from tests.helpers.platforms.triton import needs_triton, randn
from tests.platforms.gpu.ops.test_quantized import assert_close, multiply, packed_case, served
from tests.platforms.gpu.ops.test_quantized_forms import OTHERS, case, multiplied, wanted

DEVICE = needs_triton()
ROOT = Path(__file__).parents[4]
# a variant's name, and how many products its loops have
VARIANTS = {
    "quantized: product int4 apart bf16 for more": 2,
    "quantized: product int4 of rows apart bf16 for more": 2,
    "quantized: product int4 bf16 for more": 2,
    "attention: attend_tiles bf16 128/1x576 cache bf16 V in K 512": 3,
}


def chained(text: str) -> int:
    """Products in Triton's own code whose accumulator is another product's result."""
    results = set(re.findall(r"(%\S+) = tt\.dot ", text))
    return sum(each in results for each in re.findall(r"= tt\.dot %\S+, %\S+, (%\S+?)[, ]", text))


def test_what_shares_an_accumulator_is_seen() -> None:
    two = "%a_1 = tt.dot %x, %y, %acc, inputPrecision = ieee : t\n%b = tt.dot %u, %v, %a_1 : t"
    assert chained(two) == 1 and chained(two.replace("%a_1 :", "%acc :")) == 0


def compiled(names: list[str]) -> dict[str, str]:
    """Variant -> the code that Triton's first passes make of it: they join a product and a sum. In a process of its
    own, since kernels are interpreted in this one."""
    script = (
        "import sys\nfrom tests.platforms.gpu.kernels import aot\n"
        "for module, variant in aot.found():\n"
        "    name = f'{module}: {variant.name}'\n"
        "    if name in sys.argv[1:]:\n"
        "        print('VARIANT', name)\n        print(aot._compiled(variant, 100).asm['ttir'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(ROOT / "build" / "triton")}
    run = subprocess.run([sys.executable, "-c", script, *names], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(part.split("\n", 1) for part in run.stdout.split("VARIANT ")[1:])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_product_goes_into_the_accumulator_of_another() -> None:
    found = compiled(list(VARIANTS))
    assert {name: text.count("tt.dot ") >= count for name, (count, text) in _beside(found).items()} == dict.fromkeys(
        VARIANTS, True
    )
    assert {name for name, text in found.items() if chained(text)} == {"quantized: product int4 bf16 for more"}


def _beside(found: dict[str, str]) -> dict[str, tuple[int, str]]:
    return {name: (count, found[name]) for name, count in VARIANTS.items()}


@pytest.mark.parametrize("name", ["int4", "int4 of 128", "w4a8", "w4a8 of 128"])
@pytest.mark.parametrize("tokens", [1, 70])
def test_results_are_those_of_one_accumulator(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed, in halves; the last block of inputs is half there. Exactly where sums are whole numbers."""
    from quintet.platforms.gpu.kernels import chips, quantized

    x, packed, *_, bias = packed_case(name, 70, 320 if "128" not in name else 384, tokens, torch.float16)
    once = multiply(name, x, packed["weight"], packed["scales"], bias, served)
    there = chips.chip_limits_for(DEVICE)
    monkeypatch.setattr(quantized, "chip_limits_for", lambda device: replace(there, apart=True))
    apart = multiply(name, x, packed["weight"], packed["scales"], bias, served)
    torch.testing.assert_close(apart, once, rtol=2e-3, atol=2e-3)


def test_one_scale_for_a_row_of_four_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two accumulators, in pairs of bits, over more than one step."""
    from quintet.interface.weights import Matrix
    from quintet.ops.linear import linear
    from quintet.platforms.gpu.kernels import chips, quantized

    weight = torch.randint(0, 256, (40, 192), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    matrix = Matrix(weight, randn(40, 1).abs() * 0.02 + 0.003, format=WeightFormat("int4", 4, 16, 0))
    x = randn(70, 384, dtype=torch.float16)
    there = chips.chip_limits_for(DEVICE)
    monkeypatch.setattr(quantized, "chip_limits_for", lambda device: replace(there, apart=True))
    got = served("linear:int4")(x, matrix, None, (40,))
    want = linear.reference(x.float(), matrix, None, (40,))
    torch.testing.assert_close(got.float(), want, rtol=4e-3, atol=4e-3)


def test_the_chips_that_want_it() -> None:
    from quintet.platforms.gpu.kernels.chips import _apart

    assert [_apart("cuda", each) for each in (80, 90, 100, 103, 120)] == [False, False, True, True, False]
    assert not _apart("hip", "gfx942")


def test_a_probe_of_four_bits_takes_as_many_tokens_as_a_large_tile_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong from 64 tokens on, as Triton was."""
    product = provider.packed_linear

    def wrong(x: torch.Tensor, *rest: object) -> torch.Tensor:
        got = product(x, *rest)  # type: ignore[arg-type]
        return got if len(x) < 64 else got * 0.5

    monkeypatch.setattr(provider, "packed_linear", wrong)
    said = provider.check(WeightFormat("int4", 4, 16, 32))(DEVICE)
    assert said is not None and "a product of 128 tokens gave" in said
    assert provider.check(WeightFormat("int8", 8, 16, 64))(DEVICE) is None, "there is one product in its loop"


@pytest.mark.parametrize(
    "what", ["int4 of 64, zero points and minima", "int4 with one minimum", "w4a8 of 16 with minima"]
)
def test_zero_points_and_minima_come_in_once(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from quintet.platforms.gpu.kernels import chips, quantized

    there = chips.chip_limits_for(DEVICE)
    monkeypatch.setattr(quantized, "chip_limits_for", lambda device: replace(there, apart=True))
    x, matrix = case(OTHERS[what], 40, 384, 18, torch.float16)
    assert_close(multiplied(x, matrix), wanted(x, matrix), torch.float16, what)
