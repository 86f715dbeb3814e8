"""Finds the best choices for one GPU and writes them as its table, which kernels/chips.py reads.

python benchmarks/gpu_sweep.py [--results FILE] [--table FILE] [--only SECTION ...] [--seconds N]

Each choice is a table that takes the place of the chip's own in this process. If one does not compile, or gives
another result than ours, a line reports it. A choice is written if it takes at least 2% less time than ours. The file
goes into quintet/platforms/gpu/kernels/tables/ to be shipped.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # the path is set first, so that the script runs by itself
from torch import Tensor

from benchmarks.gpu_profile import clocked
from benchmarks.tpu_step import batch
from quintet.interface.types import AttentionSpec, StepContext
from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops import Op
from quintet.ops.attention import page_shape
from quintet.ops.quantize import quantize
from quintet.platforms.gpu import providers
from quintet.platforms.gpu.ops import attention as triton_attention
from quintet.platforms.gpu.ops import quantized as triton_quantized
from quintet.platforms.gpu.ops import torch_linear as torch_products
from quintet.platforms.gpu.ops.probe import device_here
from quintet.platforms.gpu.weight_layout import pack, pack_matrix
from scripts.on_gpu.jobs import note

LAYERS = {"llama-3.1-8b": (32, 8, 128), "llama-3.2-1b": (32, 8, 64), "mqa": (48, 1, 128)}  # heads, KV heads, dim
CONTEXTS = ((1, 512), (8, 512), (64, 512), (64, 4096), (1, 32768))  # requests, tokens behind each
PROMPTS = (512, 2048)
WEIGHTS = ((6144, 4096), (28672, 4096), (4096, 14336))  # outputs, inputs: of Llama-3.1-8B
FORMS = {  # by Packed.named()
    "int4": WeightFormat("int4", 4, 16, 128),
    "int8": WeightFormat("int8", 8, 16, 128),
    "int8a8": WeightFormat("w8a8", 8, 8),
    "fp8": WeightFormat("fp8", 8, 16, dtype=torch.float8_e4m3fn),
}
TOKENS = {"16": 16, "64": 64, "more": 512}  # that a product of each class is measured with
SPLITS = (64, 128, 256, 512, 1024)
DECODE = tuple(itertools.product((32, 64), (2, 4, 8), (2, 3, 5)))  # slots, warps, stages
TILES = tuple(itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)))  # rows, slots, warps, stages
PRODUCTS = {  # tokens, outputs, warps, stages
    "16": tuple(itertools.product((16,), (32, 64, 128), (4, 8), (3, 4, 5))),
    "64": tuple(itertools.product((32, 64), (64, 128), (4, 8), (3, 4))),
    "more": tuple(itertools.product((64, 128), (64, 128), (4, 8), (3, 4))),
}
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)  # tokens by which our kernels and torch's change places
EXPERTS = (8, 4096, 1024)  # experts, hidden and inner numbers
TOLERANCE = 2e-2  # between results of one step in bfloat16, by the largest
GAIN = 0.02  # of the time, for less of which nothing is written

Call = Callable[[], Tensor]
Clock = Callable[[Call, torch.device, int], float]  # seconds of each of so many calls
Tell = Callable[..., None]


@dataclass(frozen=True)
class Place:
    """The device and clock that choices are measured with."""

    device: torch.device
    tell: Tell
    clock: Clock
    small: bool  # for the interpreter
    until: float = float("inf")  # by time.monotonic(): no choice is tried from then on

    @property
    def rounds(self) -> int:
        return 1 if self.small else 50


@dataclass(frozen=True)
class Question:
    """One choice for some calls: a table's section, its key there, and the values to try."""

    section: str
    key: str  # "" where the section is one number
    choices: Sequence[Any]
    calls: Sequence[Call]

    def answered(self, table: Mapping[str, Any], choice: Any) -> dict[str, Any]:
        """The table with that choice."""
        value = {**table.get(self.section, {}), self.key: choice} if self.key else choice
        return {**table, self.section: value}


@contextlib.contextmanager
def trying(table: Mapping[str, Any]) -> Iterator[None]:
    """Kernels go by this table meanwhile; ValueError if it is none."""
    from quintet.platforms.gpu.kernels import chips

    found, before = chips.checked(table), chips.table_of

    def use(table_of: Any) -> None:
        chips.table_of = table_of
        chips.chip_limits_for.cache_clear()
        triton_attention.limits.cache_clear()

    use(lambda chip, folder=None: found)
    try:
        yield
    finally:
        use(before)


def answer(table: dict[str, Any], question: Question, place: Place) -> dict[str, Any]:
    """The table with the fastest choice, if it is faster than what the table gives without."""
    about = {"section": question.section, "key": question.key}
    with trying(table):
        wanted = [call().float() for call in question.calls]
        ours = [place.clock(call, place.device, place.rounds) for call in question.calls]
    place.tell(kind="ours", **about, us=[round(each * 1e6, 2) for each in ours])
    best, least = table, 1 - GAIN
    for choice in question.choices:
        if time.monotonic() > place.until:
            place.tell(kind="failed", **about, why="no time was left")
            break
        other = question.answered(table, choice)
        try:
            with trying(other):
                off = max(map(_off, question.calls, wanted))
                times = [place.clock(call, place.device, place.rounds) for call in question.calls]
        except Exception as error:  # too much shared memory, say
            place.tell(kind="failed", **about, choice=choice, why=f"{type(error).__name__}: {error}"[:300])
            continue
        share = sum(each / own for each, own in zip(times, ours, strict=True)) / len(ours)
        place.tell(
            kind="choice", **about, choice=choice, us=[round(each * 1e6, 2) for each in times], share=share, off=off
        )
        if off <= TOLERANCE and share < least:
            best, least = other, share
    print(f"{question.section} {question.key}: {best.get(question.section)}, {least:.2f} of ours", flush=True)
    return best


def _off(call: Call, want: Tensor) -> float:
    return float((call().float() - want).abs().max() / want.abs().max().clamp(min=1e-6))


def attended(layer: tuple[int, int, int], requests: int, new: int, behind: int, place: Place) -> Call:
    """Attention over random pages, by Triton."""
    heads, kv_heads, dim = layer
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, torch.bfloat16, 16)
    host = batch(requests, new, behind)
    there = host.on([torch.from_numpy(each).to(place.device) for each in host.leaves()])
    kv = _drawn(place, int(there.groups[0].block_table.max()) + 1, *page_shape(spec))
    q = _drawn(place, requests * new, heads, dim)
    step_context = StepContext(there, there.groups[0])
    return partial(Op.registry["paged_attention"].providers["triton"], q, kv, step_context, spec, None)


def attention_questions(place: Place) -> Iterator[Question]:
    from quintet.platforms.gpu.kernels.attention_layer import AttentionLayer

    layers = {"tiny": (4, 2, 16)} if place.small else LAYERS
    contexts = ((2, 70),) if place.small else CONTEXTS
    for number, (heads, kv_heads, dim) in enumerate(layers.values()):
        layer = heads, kv_heads, dim
        decodes = [attended(layer, requests, 1, context - 1, place) for requests, context in contexts]
        if not number:
            yield Question("split", "", SPLITS, decodes)
        name = str(
            AttentionLayer(heads, kv_heads, dim, 16, "bf16", wide=not triton_attention.limits(place.device).bf16)
        )
        named = [dict(zip(("slots", "warps", "stages"), each, strict=True)) for each in DECODE]
        yield Question("decode", name, named, decodes)
        del decodes
        prompts = [attended(layer, 1, tokens, 0, place) for tokens in ((40,) if place.small else PROMPTS)]
        named = [dict(zip(("rows", "slots", "warps", "stages"), each, strict=True)) for each in TILES]
        yield Question("prompts", name, named, prompts)


def product_questions(place: Place) -> Iterator[Question]:
    for kind, fmt in FORMS.items():
        weights = [matrix(fmt, *shape, place) for shape in _weights(place)]
        for most, tokens in TOKENS.items():
            tokens = 3 if place.small else tokens
            calls = [product(triton_quantized.packed_linear, each, tokens, place) for each in weights]
            named = [dict(zip(("tokens", "outputs", "warps", "stages"), each, strict=True)) for each in PRODUCTS[most]]
            if not place.small or most == "16":
                yield Question("products", f"{kind} {most}", named, calls)


def _weights(place: Place) -> Sequence[tuple[int, int]]:
    return ((64, 128),) if place.small else WEIGHTS


def matrix(fmt: WeightFormat, outputs: int, inputs: int, place: Place) -> Matrix:
    """As place() of the platform leaves it."""
    weight = _drawn(place, outputs, inputs).float() * 0.02
    if fmt.dtype is None:
        made = pack(weight, fmt)
    else:
        found = quantize(weight, fmt)
        assert found.scales is not None, "what is quantized has scales"
        made = pack_matrix({"weight": found.values, "scales": found.scales}, fmt)
    return Matrix(made["weight"], made["scales"], format=fmt)


def product(by: Callable[..., Tensor], weight: Matrix, tokens: int, place: Place) -> Call:
    assert weight.scales is not None, "what is quantized has scales"
    outputs = len(weight.values)
    inputs = weight.values.shape[1:].numel() * 8 // weight.format.bits
    return partial(by, _drawn(place, tokens, inputs), weight, None, (outputs,))


def ways(place: Place) -> Iterator[tuple[str, Callable[[int], tuple[list[Call], list[Call]]]]]:
    """(name in a table's rows, what makes our calls and torch's for so many rows)."""
    fp8 = torch.float8_e4m3fn
    for name, fmt, torchs in (
        ("FEW", WeightFormat("fp8a8", 8, 8, dtype=fp8), torch_products.by_float8),
        ("FEW_BLOCKS", WeightFormat("fp8a8", 8, 8, 128, dtype=fp8, outputs_per_scale=128), torch_products.by_float8),
        ("FEW_INTEGERS", WeightFormat("w8a8", 8, 8), torch_products.by_int8),
    ):
        weights = [matrix(fmt, *shape, place) for shape in _weights(place)]

        def made(rows: int, weights: Any = weights, torchs: Any = torchs) -> tuple[list[Call], list[Call]]:
            ours = [product(triton_quantized.packed_linear, each, rows, place) for each in weights]
            return ours, [partial(torchs, *call.args[:3]) for call in ours]  # type: ignore[attr-defined]

        yield name, made
    yield "FEW_EACH", partial(_experts, place=place)


def _experts(each: int, place: Place) -> tuple[list[Call], list[Call]]:
    """With so many rows for each expert."""
    from quintet.platforms.gpu.ops import moe as triton_moe

    count, hidden, inner = (2, 32, 16) if place.small else EXPERTS
    tokens = count * each
    ids = torch.arange(tokens, dtype=torch.int32, device=place.device)[:, None] % count
    stacks = _drawn(place, count, 2 * inner, hidden) / 16, _drawn(place, count, hidden, inner) / 16
    args = _drawn(place, tokens, hidden), *stacks, torch.ones(tokens, 1, device=place.device), ids, "silu"
    return [partial(triton_moe.mixed_experts, *args)], [partial(torch_products.by_groups, *args)]


def few(name: str, made: Callable[[int], tuple[list[Call], list[Call]]], place: Place) -> int | None:
    """The most rows up to which our kernels are faster, of ROWS; None where torch's do not serve."""
    last = 0
    for rows in ROWS:
        if time.monotonic() > place.until:
            place.tell(kind="failed", section="rows", key=name, why="no time was left")
            return None
        try:
            times = [sum(place.clock(call, place.device, place.rounds) for call in calls) for calls in made(rows)]
        except Exception as error:  # _int_mm refuses few rows
            place.tell(kind="failed", section="rows", key=name, rows=rows, why=f"{type(error).__name__}: {error}"[:300])
            if rows == ROWS[-1]:
                return None
            last = rows
            continue
        place.tell(kind="rows", key=name, rows=rows, us=[round(each * 1e6, 2) for each in times])
        if times[0] >= times[1]:
            return last
        last = rows
    return last


def tune(place: Place, only: Sequence[str] = ()) -> dict[str, Any]:
    """The chip's table, from what it has now on."""
    from quintet.platforms.gpu.kernels import chips

    sections = only or SECTIONS
    table = {name: value for name, value in asdict(chips.chip_limits_for(place.device).table).items() if value}
    table["chip"] = _name(place.device)
    if "attention" in sections:
        for question in attention_questions(place):
            table = answer(table, question, place)
    if "products" in sections:
        for question in product_questions(place):
            table = answer(table, question, place)
    if "rows" in sections:
        for name, made in ways(place):
            with trying(table):
                found = few(name, made, place)
            print(f"rows {name}: {found}", flush=True)
            if found is not None:
                table = {**table, "rows": {**table.get("rows", {}), name: found}}
    table["measured"] = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "triton": _triton()}
    chips.checked(table)
    return table


SECTIONS = ("rows", "attention", "products")


def _name(device: torch.device) -> str:
    return "interpreter" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def _triton() -> str:
    import triton

    return str(triton.__version__)


def _drawn(place: Place, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=place.device)


def main() -> int:
    """0, also where some choices cannot be: that is a result."""
    from quintet.platforms.gpu.kernels import chips

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="for the log: the device is torch's own")
    parser.add_argument("--results", type=Path, help="a file that gets a line for each figure")
    parser.add_argument(
        "--table", type=Path, help="the table's file; beside the results by default, by the chip's name"
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=())
    parser.add_argument("--seconds", type=float, default=420.0, help="after which no choice is tried")
    args = parser.parse_args()
    providers.register()
    device = device_here()
    if device is None:
        print("nothing was measured: torch finds no GPU", file=sys.stderr)
        return 1
    tell: Tell = partial(note, args.results) if args.results else lambda **values: None
    place = Place(device, tell, clocked, device.type == "cpu", time.monotonic() + args.seconds)
    table = tune(place, args.only)
    folder = args.results.parent if args.results else Path()
    path = args.table or chips.table_path(table["chip"], folder)
    path.write_text(json.dumps(table, indent=1) + "\n")
    tell(kind="table", table=table)
    print(f"{path}: {json.dumps(table)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
