"""A chip's table of choices: read, refused where it has unknown names, and written by one command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.platforms.triton import needs_triton, randn

pytest.importorskip("triton")
from benchmarks import gpu_sweep
from quintet.platforms.gpu.kernels import attention, attention_split, chips, quantized
from quintet.platforms.gpu.kernels.attention_layer import AttentionLayer, DeviceLimits
from quintet.platforms.gpu.kernels.product_tiles import ProductTile, tile_for
from quintet.platforms.gpu.ops import attention as triton_attention
from quintet.platforms.gpu.ops import torch_linear as torch_products

DEVICE = needs_triton()
LLAMA = AttentionLayer(32, 8, 128, 16, "bf16")
WHOLE: dict[str, Any] = {
    "chip": "NVIDIA H100 80GB HBM3", "measured": {"date": "2026-11-27"}, "rows": {"FEW": 3, "FEW_EACH": 0},
    "split": 512, "decode": {str(LLAMA): {"slots": 32, "warps": 8, "stages": 3}},
    "prompts": {str(LLAMA): {"rows": 64, "slots": 128, "warps": 4, "stages": 2}},
    "products": {"int4 16": {"tokens": 16, "outputs": 128, "warps": 8, "stages": 5}},
}  # fmt: skip
here = pytest.mark.skipif(DEVICE.type != "cpu", reason="a clock of our own, for kernels that are interpreted")


def test_every_shipped_table_is_one() -> None:
    for path in chips.TABLES.glob("*"):
        table = chips.checked(json.loads(path.read_text()))
        assert chips.table_path(table.chip) == path and chips.table_of(table.chip).chip == table.chip


def test_a_table_is_found_by_the_chips_name(tmp_path: Path) -> None:
    path = chips.table_path("NVIDIA H100 80GB HBM3", tmp_path)
    assert path.name == "nvidia_h100_80gb_hbm3.json" and chips.table_of("NVIDIA H100 80GB HBM3", tmp_path).split == 0
    path.write_text(json.dumps(WHOLE))
    assert chips.table_of("NVIDIA H100 80GB HBM3", tmp_path).split == 512
    assert chips.table_of("NVIDIA H200", tmp_path) is chips.NOTHING


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"splits": 512}, "a table has splits; known are chip, decode, measured, products, prompts, rows, split"),
        ({"rows": {"FEWER": 1}}, "rows has FEWER; known are FEW, FEW_BLOCKS, FEW_EACH, FEW_INTEGERS"),
        ({"decode": {"x": {"rows": 64}}}, "decode, x has rows; known are slots, stages, warps"),
        ({"products": {"int4 16": {"slots": 64}}}, "products, int4 16 has slots; known are outputs, stages"),
        ({"prompts": {"x": {"rows": 48}}}, "prompts, x, rows is 48, not a power of two from 1 on"),
        ({"decode": {"x": {"stages": 0}}}, "decode, x, stages is 0, not a whole number from 1 on"),
        ({"split": 32}, "split is 32, not a power of two from 64 on"),
        ({"rows": {"FEW": 1.5}}, "rows, FEW is 1.5, not a whole number from 0 on"),
    ],
)
def test_unknown_names_and_other_numbers_are_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    chips.table_path("X 1", tmp_path).write_text(json.dumps(given))
    with pytest.raises(ValueError, match="x_1.json: ") as caught:
        chips.table_of("X 1", tmp_path)
    assert said in str(caught.value)


def test_kernels_go_by_it() -> None:
    """Each layer and each kind of weight by its own entry; all others choose for themselves."""
    ours, other = DeviceLimits(), replace(LLAMA, dim=64)
    tuned = replace(ours, cut=replace(ours.cut, table=chips.checked(WHOLE)))
    decode = attention_split.split_blocks(LLAMA, tuned)
    assert (decode.slots, decode.warps, decode.stages) == (32, 8, 3)
    assert attention_split.least_blocks(decode, tuned) == 16 and attention_split.least_blocks(decode, ours) == 8
    prompts = attention.tile_blocks(LLAMA, tuned)
    assert (prompts.rows, prompts.slots, prompts.warps, prompts.stages) == (64, 128, 4, 2)
    for blocks in (attention_split.split_blocks, attention.tile_blocks):
        assert blocks(other, tuned) == blocks(other, ours)
    assert tile_for(7, False, "int4", tuned.cut) == ProductTile(16, 128, 8, 5)
    for tokens, kind in ((17, "int4"), (7, "int8"), (7, "")):
        assert tile_for(tokens, False, kind, tuned.cut) == tile_for(tokens, False, kind, ours.cut)
    with gpu_sweep.trying(WHOLE):
        assert [torch_products._few(name, DEVICE) for name in ("FEW", "FEW_EACH")] == [3, 0]
        assert torch_products._few("FEW_INTEGERS", DEVICE) == torch_products.FEW_INTEGERS
        assert triton_attention.limits(DEVICE).cut.table.split == 512
    assert torch_products._few("FEW", DEVICE) == torch_products.FEW
    assert not triton_attention.limits(DEVICE).cut.table.split


def test_names_of_weights() -> None:
    scales = torch.ones(1, 1)
    packed = quantized.PackedWeight(torch.zeros(1, 64), scales, 1, 4)
    assert packed.named(False) == "int4" and replace(packed, bits=8).named(True) == "int8a8"
    assert replace(packed, bits=8, kind=torch.float8_e4m3fn).named(True) == "fp8a8"
    assert replace(packed, table=(1.0,)).named(False) == "table4"


class Clock:
    """Splits of 512 slots, 32 slots at a time, tiles of 64 outputs and 2 stages are fastest; so are our products of up
    to 16 rows, and no product by torch of whole numbers."""

    def __call__(self, call: Any, device: torch.device, rounds: int) -> float:
        table = chips.chip_limits_for(device).table
        seconds = 1.0 if table.split == 512 else 1.5
        for section, name, best in (("decode", "slots", 32), ("prompts", "rows", 64), ("products", "outputs", 32)):
            if any(values[name] == best for values in getattr(table, section).values()):
                seconds -= 0.2
        return seconds


@here
def test_one_command_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that is made up; what does not gain is not written."""
    notes: list[dict[str, Any]] = []
    monkeypatch.setattr(gpu_sweep, "SPLITS", (128, 256, 512))
    monkeypatch.setattr(gpu_sweep, "DECODE", ((64, 4, 2), (32, 4, 2)))
    monkeypatch.setattr(gpu_sweep, "TILES", ((128, 64, 8, 2), (64, 64, 8, 2)))
    monkeypatch.setattr(gpu_sweep, "PRODUCTS", {"16": ((16, 128, 4, 4), (16, 32, 4, 3)), "64": (), "more": ()})
    monkeypatch.setattr(gpu_sweep, "FORMS", {"int4": gpu_sweep.FORMS["int4"]})

    def ways(place: gpu_sweep.Place) -> Any:
        """Ours take 1 us a row, torch's 20 us; the last are never served."""
        yield "FEW", lambda rows: ([rows], [20])
        yield "FEW_BLOCKS", lambda rows: ([30 + rows], [20])
        yield "FEW_INTEGERS", lambda rows: 1 / 0

    monkeypatch.setattr(gpu_sweep, "ways", ways)
    clock = Clock()
    place = gpu_sweep.Place(
        DEVICE, lambda **values: notes.append(values),
        lambda call, device, rounds: call * 1e-6 if isinstance(call, int) else clock(call, device, rounds), True,
    )  # fmt: skip
    table = gpu_sweep.tune(place)
    tiny = str(AttentionLayer(4, 2, 16, 16, "bf16"))
    assert table["chip"] == "interpreter" and table["rows"] == {"FEW": 16, "FEW_BLOCKS": 0}
    assert table["split"] == 512 and table["decode"] == {tiny: {"slots": 32, "warps": 4, "stages": 2}}
    assert table["prompts"] == {tiny: {"rows": 64, "slots": 64, "warps": 8, "stages": 2}}
    assert table["products"] == {"int4 16": {"tokens": 16, "outputs": 32, "warps": 4, "stages": 3}}
    assert sorted(table["measured"]) == ["date", "torch", "triton"]
    chips.table_path("interpreter", tmp_path).write_text(json.dumps(table))
    assert chips.table_of("interpreter", tmp_path).split == 512
    assert {each["section"] for each in notes if each["kind"] == "choice"} == {"split", "decode", "prompts", "products"}
    assert chips.chip_limits_for(DEVICE).table is chips.NOTHING, "nothing is left behind"


@here
def test_a_choice_that_errs_or_does_not_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[dict[str, Any]] = []

    def call() -> torch.Tensor:
        split = chips.chip_limits_for(DEVICE).table.split
        if split == 64:
            raise RuntimeError("out of resource: shared memory")
        return randn(4, 4) * (2 if split == 128 else 1)

    place = gpu_sweep.Place(
        DEVICE, lambda **values: notes.append(values),
        lambda call, device, rounds: 1.0 / (1 + chips.chip_limits_for(device).table.split % 512), True,
    )  # fmt: skip
    question = gpu_sweep.Question("split", "", (64, 128, 512), [call])
    assert gpu_sweep.answer({"chip": "x"}, question, place) == {"chip": "x"}
    assert [each["kind"] for each in notes] == ["ours", "failed", "choice", "choice"]
    late = replace(place, until=0.0)
    assert gpu_sweep.answer({}, question, late) == {} and notes[-1]["why"] == "no time was left"


@here
def test_the_command_runs_where_kernels_are_interpreted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_sweep.py", "--results", str(tmp_path / "r.jsonl"), "--seconds", "0"])
    assert gpu_sweep.main() == 0
    assert chips.table_of("interpreter", tmp_path).chip == "interpreter"
    assert "no time was left" in (tmp_path / "r.jsonl").read_text()
