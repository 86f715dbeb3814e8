"""Arguments of an attention kernel's launch: the layer, the device's limits, and one call's tensors."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quintet.interface.types import StepContext
from quintet.platforms.gpu.kernels import attention_parts as parts
from quintet.platforms.gpu.kernels.chips import ChipLimits

CHUNK = 256  # requests that a program looks through at a time
MOST_ROWS, MOST_WIDE_ROWS = 128, 16  # query heads of a program; where V has more than 256 numbers
LOG2E: float = parts.LOG2E.value
INT8, E4M3, E5M2, E4M3FNUZ, PLAIN = (
    each.value for each in (parts.INT8, parts.E4M3, parts.E5M2, parts.E4M3FNUZ, parts.PLAIN)
)
FLOAT8 = {E4M3: "e4m3 bytes", E5M2: "e5m2", E4M3FNUZ: "e4m3fnuz bytes"}  # in bytes, by their names
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
COMPUTE = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


@dataclass(frozen=True)
class DeviceLimits:
    """Limits of a device; the defaults are the smallest of those that kernels are compiled ahead for."""

    shared: int = 163 * 1024  # bytes of shared memory that one program may have
    processors: int = 2
    e4m3: bool = False  # Triton converts float8_e4m3fn here
    e4m3fnuz: bool = False  # and float8_e4m3fnuz
    cut: ChipLimits = ChipLimits()  # what its registers bear
    bf16: bool = True  # products of bfloat16; Triton's interpreter has none


@dataclass(frozen=True)
class AttentionBlocks:
    """Block sizes, warps and stages of a kernel."""

    rows: int  # queries: tokens times the heads of a group
    slots: int  # of context
    warps: int
    stages: int

    def within(self, cut: ChipLimits) -> "AttentionBlocks":
        """Rows are left to the kernel: a tile holds all query heads of a program."""
        return AttentionBlocks(
            self.rows, min(self.slots, cut.slots), min(self.warps, cut.warps), min(self.stages, cut.stages)
        )

    def tuned(self, layer: "AttentionLayer", table: Mapping[str, Mapping[str, int]]) -> "AttentionBlocks":
        """Returns these blocks with what a chip's table has for the layer."""
        return replace(self, **table.get(name_of(layer), {})) if table else self


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer, as kernels are compiled for it."""

    heads: int
    kv_heads: int
    dim: int
    page_size: int
    dtype: str  # of queries and results, in Triton's words
    stored: int = PLAIN
    window: int = 0  # 0: none
    capped: bool = False
    sloped: bool = False
    sinks: bool = False
    wide: bool = False  # products in float32 whatever the type: the interpreter's
    e4m3: bool = False  # the cache is of float8_e4m3fn, which Triton converts
    shared: int = 0  # V is the first so many numbers of K, and is not kept; 0: it is
    causal: bool = True
    local: int = 0  # positions of a chunk, which alone is seen; 0: none
    e4m3fnuz: bool = False  # the cache is of float8_e4m3fnuz, which Triton converts

    def __str__(self) -> str:
        extras = [f"V in K {self.shared}"] * bool(self.shared) + ["not causal"] * (not self.causal)
        extras += [f"window {self.window}"] * bool(self.window) + ["soft-cap"] * self.capped
        extras += [f"chunks of {self.local}"] * bool(self.local)
        extras += ["slopes"] * self.sloped + ["sinks"] * self.sinks
        plain = "e4m3" if self.e4m3 else "e4m3fnuz" if self.e4m3fnuz else self.dtype
        cache = {PLAIN: plain, INT8: "int8", **FLOAT8}[self.stored]
        return " ".join([self.dtype, f"{self.heads}/{self.kv_heads}x{self.dim}", f"cache {cache}", *extras])

    @property
    def group(self) -> int:
        """Query heads of a program: all of a KV head's, or an equal part of them."""
        all_of_them = self.heads // self.kv_heads
        most = MOST_WIDE_ROWS if self.block_dim > 256 else MOST_ROWS
        return max(count for count in range(1, min(all_of_them, most) + 1) if all_of_them % count == 0)

    @property
    def programs(self) -> int:
        """That share out the heads."""
        return self.heads // self.group

    @property
    def value(self) -> int:
        return self.shared or self.dim

    @property
    def block_dim(self) -> int:
        return max(16, triton.next_power_of_2(self.value))

    @property
    def block_rest(self) -> int:
        """Block size for the dimensions that K has beyond V; 0 if none."""
        return max(16, triton.next_power_of_2(self.dim - self.value)) if self.dim > self.value else 0

    @property
    def bytes(self) -> int:
        return BYTES[self.dtype]

    @property
    def sight(self) -> dict[str, int]:
        """Returns how far back a token sees, as constants of a kernel."""
        return {"WINDOW": self.window, "LOCAL": self.local}

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "GROUP": self.group,
            "PIECES": self.programs // self.kv_heads,
            "KV_HEADS": self.kv_heads,
            "DIM": self.dim,
            "VALUE": self.value,
            "BLOCK_D": self.block_dim,
            "BLOCK_R": self.block_rest,
            "V_ROWS": 0 if self.shared else self.kv_heads * self.page_size,
            "PAGE_SIZE": self.page_size,
            "WIDTH": self.dim + 4 * (self.stored == INT8),
            "STORED": self.stored,
            "COMPUTE": tl.float32 if self.wide else COMPUTE[self.dtype],
            "CAPPED": self.capped,
            "SLOPED": self.sloped,
            "HAS_SINKS": self.sinks,
        }

    def signature(self, results: Sequence[str], sizes: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
        """(types, constants) of a kernel that has these results and sizes beside Call's arrays and numbers."""
        plain = "fp8e4nv" if self.e4m3 else "fp8e4b8" if self.e4m3fnuz else self.dtype
        cache = {PLAIN: plain, INT8: "i8"}.get(self.stored, "u8")
        types = {"out": self.dtype, "q": self.dtype, "kv": cache, "scales": "fp32", "sinks": self.dtype}
        given = {"scales": self.stored == INT8, "sinks": self.sinks, "slopes": self.sloped}
        arrays = (*results, "q", "kv", "scales", "table", "starts", "lengths", "sinks", "slopes")
        integers = dict.fromkeys(("table", "starts", "lengths"), "i32")
        signature = {name: f"*{(types | integers).get(name, 'fp32')}" for name in arrays if given.get(name, True)}
        signature |= dict.fromkeys(sizes, "i32") | {"q_stride": "i32:16", "gain": "fp32", "cap": "fp32"}
        return signature, self.constants | {name: None for name, there in given.items() if not there}


@functools.cache
def name_of(layer: AttentionLayer) -> str:
    """Returns the key of its place in a chip's table."""
    return str(layer)


def fitting(layer: AttentionLayer, shared: int, rows: int, slots: int) -> int:
    """Stages of the loop over blocks: 5 keep two blocks of K and V in shared memory beside queries and weights, 3 one.

    Two stages go by before a block's pages are known.
    """
    columns = layer.block_dim + layer.block_rest
    block = slots * (columns if layer.shared else 2 * layer.block_dim) * layer.bytes
    blocks = (shared - rows * (columns + slots) * layer.bytes) // block
    return (2, 3, 5)[max(0, min(2, blocks))]


@dataclass(frozen=True)
class AttentionLaunch:
    """One launch: out [T, H, value], q [T, H, D], kv seen as [P, 2 or 1, Hkv, page_size, row width], scales as
    float32 of it."""

    layer: AttentionLayer
    limits: DeviceLimits
    context: StepContext
    out: Tensor
    q: Tensor
    kv: Tensor
    scales: Tensor | None
    sinks: Tensor | None
    slopes: Tensor | None
    scale: float
    softcap: float | None

    @property
    def arrays(self) -> tuple[Tensor | None, ...]:
        batch, group = self.context
        return (
            self.q,
            self.kv,
            self.scales,
            group.block_table,
            batch.query_start_loc,
            group.seq_lens,
            self.sinks,
            self.slopes,
        )

    @property
    def requests(self) -> int:
        return self.context.group.seq_lens.shape[0]

    @property
    def pages(self) -> int:
        """Columns of the table."""
        return self.context.group.block_table.shape[1]

    @property
    def numbers(self) -> tuple[float, ...]:
        """q's stride between tokens; what a score is multiplied by first; with a soft-cap, what its tanh is."""
        if self.softcap is None:
            return self.q.stride(0), self.scale * LOG2E, 0.0
        return self.q.stride(0), self.scale / self.softcap, self.softcap * LOG2E


RARE = (  # kinds of layers that a model may have, which seldom come
    AttentionLayer(8, 8, 16, 16, "bf16"),
    AttentionLayer(32, 2, 80, 16, "bf16"),
    AttentionLayer(32, 2, 80, 16, "fp16", INT8),
    AttentionLayer(48, 1, 128, 16, "bf16"),
    AttentionLayer(128, 1, 128, 16, "bf16"),
    AttentionLayer(48, 1, 128, 16, "bf16", INT8),
    AttentionLayer(128, 1, 64, 16, "fp16", sinks=True),
    AttentionLayer(8, 4, 256, 16, "bf16"),
    AttentionLayer(8, 4, 256, 16, "bf16", INT8, capped=True),
    AttentionLayer(8, 1, 512, 16, "bf16"),
    AttentionLayer(16, 2, 128, 16, "fp32"),
    AttentionLayer(8, 8, 256, 16, "fp32", window=512),
    AttentionLayer(32, 32, 128, 16, "bf16", sloped=True),
    AttentionLayer(32, 8, 128, 16, "bf16", E5M2),
    AttentionLayer(8, 4, 256, 16, "bf16", e4m3=True),
    AttentionLayer(128, 1, 576, 16, "bf16", shared=512, e4m3=True),
)
