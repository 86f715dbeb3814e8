"""compressed-tensors (vLLM project, 2024), as llm-compressor and AutoRound write it: its schemes and formats.

A scheme says how weights and activations of a group of modules are quantized, a format how the weights lie in the file.
Activations have 8 bits in products too where weights are whole numbers; everywhere else they stay as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quintet.interface.weights import WeightReader
from quintet.layers.quantization import fp4_fp8 as minifloats
from quintet.layers.quantization.block_scales import BlockScales
from quintet.layers.quantization.fp4_fp8 import BLOCK, SMALL_BLOCK, Float8Weights
from quintet.layers.quantization.integers import IntWeights
from quintet.layers.quantization.module_patterns import ModuleNames, regex_names

NAME = "compressed-tensors"
UNPACKED_FORMATS = ("int-quantized", "naive-quantized", "float-quantized")  # a number each, of whatever type
FLOAT_FORMATS = ("dense", "fakequant", "")
SPARSE_FORMATS = ("sparse-24-bitmask", "sparse-bitmask", "marlin-24")
MAX_GROUP = 2**20  # outputs or inputs that share a scale
LINEAR_CLASSES = ("Linear", "LinearBase")  # the modules of products
# What says nothing of a weight: scales of activations, of the cache, and shapes that are known.
IGNORED_SUFFIXES = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point", ".weight_shape",
    ".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".q_zero_point", ".weight_observer",
    ".k_global_scale", ".v_global_scale", ".q_global_scale",
)  # fmt: skip


@dataclass(frozen=True)
class QuantizationArgs:
    """Quantization arguments of weights or of activations."""

    bits: int
    floats: bool
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, int]
    dynamic: bool


@dataclass(frozen=True)
class ConfigGroup:
    """Modules that are held alike; a reader of None leaves them in floats."""

    targets: ModuleNames
    all_linear: bool  # all products, where nothing else names them
    reader: WeightReader | None


def parse_arguments(config: object, where: str) -> QuantizationArgs | None:
    """Reads the arguments of a configuration; None where nothing is quantized. ValueError for invalid ones."""
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} is {config!r:.60}, not an object; correct config.json")
    group, block = config.get("group_size"), config.get("block_structure")
    strategy = config.get("strategy") or _default_strategy(group)
    if isinstance(block, str) and len(block) < 20:
        block = [int(each) for each in block.split("x") if each.isdecimal()]
    bits, inputs = config.get("num_bits", 8), 0 if group in (None, -1) else group
    for key, value in (("num_bits", bits), ("group_size", inputs)):
        if type(value) is not int or not 0 <= value <= MAX_GROUP:
            raise ValueError(f"{where} has {key} {value!r:.60}, which is none; correct config.json")
    sizes = block if strategy == "block" else [1, 1]
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(type(n) is int and 0 < n <= MAX_GROUP for n in sizes)):
        raise ValueError(f"{where} has block_structure {block!r:.60}, not two sizes such as [128, 128]")
    return QuantizationArgs(
        bits, str(config.get("type", "int")).lower() == "float", config.get("symmetric", True) is not False,
        str(strategy).lower(), inputs, (sizes[0], sizes[1]),
        config.get("dynamic", False) is True,
    )  # fmt: skip


def _default_strategy(group: object) -> str:
    """Returns the strategy where none is named."""
    return "tensor" if group is None else "channel" if group == -1 else "group"


def scale_layout(weights: QuantizationArgs, where: str) -> BlockScales:
    """Returns the layout of the scales. ValueError for strategies that weights cannot have."""
    if weights.strategy in ("group", "tensor_group"):
        if weights.group < 16 or weights.group % 16:
            raise ValueError(f"{where} has group_size {weights.group}; quintet reads multiples of 16")
        return BlockScales(1, weights.group)
    if weights.strategy == "block":
        if weights.block[1] % 16:
            raise ValueError(f"{where} has block_structure {list(weights.block)}; the second is to be a multiple of 16")
        return BlockScales(*weights.block)
    shapes = {"channel": BlockScales(1, 0), "tensor": BlockScales(0, 0)}
    if weights.strategy not in shapes:
        raise ValueError(
            f"{where} has the strategy {weights.strategy!r:.60}; quintet reads tensor, channel, group and block"
        )
    return shapes[weights.strategy]


def reader(weights: QuantizationArgs, inputs: QuantizationArgs | None, fmt: str, where: str) -> WeightReader:
    """Returns the reader of a scheme in a format. ValueError says what in it is of another kind, and what would do."""
    lie = scale_layout(weights, where)
    if weights.floats:
        if not weights.symmetric:
            raise ValueError(f"{where} has floats with zero points; quintet reads symmetric ones")
        return _float_reader(weights, lie, fmt, where)
    if not 2 <= weights.bits <= 8:
        raise ValueError(f"{where} has {weights.bits} bits; quintet reads 2 to 8, W4A16 and W8A8 among them")
    if fmt not in (*UNPACKED_FORMATS, "pack-quantized"):
        raise ValueError(
            f"{where} has whole numbers in the format {fmt!r:.60}; quintet reads pack-quantized and int-quantized"
        )
    if lie.rows > 1:
        raise ValueError(f"{where} has whole numbers in blocks; quintet reads them by tensor, channel and group")
    rounded = inputs is not None and not inputs.floats and inputs.bits <= 8
    return IntWeights(weights.bits, lie, not weights.symmetric, 8 if rounded else 16, fmt == "pack-quantized")


def _float_reader(weights: QuantizationArgs, scales_layout: BlockScales, fmt: str, where: str) -> WeightReader:
    if weights.bits == 8 and fmt == "mxfp8-quantized" and scales_layout == BlockScales(1, BLOCK):
        return minifloats.mxfp8()
    if weights.bits == 8 and fmt in UNPACKED_FORMATS:
        return Float8Weights(scales_layout)
    if weights.bits == 4 and fmt == "nvfp4-pack-quantized" and scales_layout == BlockScales(1, SMALL_BLOCK):
        return minifloats.nvfp4("weight_packed", "weight_global_scale", divides=True)
    if weights.bits == 4 and fmt == "mxfp4-pack-quantized" and scales_layout == BlockScales(1, BLOCK):
        return minifloats.mxfp4()
    raise ValueError(
        f"{where} has floats of {weights.bits} bits by {weights.strategy} (group_size {weights.group}) in the "
        f"format {fmt!r:.60}; quintet reads float-quantized, mxfp8-quantized, nvfp4-pack-quantized and "
        "mxfp4-pack-quantized"
    )


def notes(weights: QuantizationArgs, inputs: QuantizationArgs | None) -> list[str]:
    """Returns notes on what is computed otherwise than the scheme means it."""
    if inputs is None:
        return []
    if inputs.floats:
        return [f"activations stay in the model's type, where the checkpoint means floats of {inputs.bits} bits"]
    if weights.floats or inputs.bits > 8:
        return ["activations stay in the model's type, where the checkpoint means whole numbers"]
    remarks = []
    if not inputs.dynamic:
        remarks.append(
            "activations are quantized as they come, each token by itself: static scales of inputs are not used"
        )
    elif inputs.strategy != "token":
        remarks.append("activations are quantized each token by itself")
    if not inputs.symmetric:
        remarks.append("activations are quantized without zero points")
    if inputs.bits < 8:
        remarks.append(f"activations have 8 bits, where the checkpoint means {inputs.bits}")
    return remarks


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """ValueError for what changes what weights mean and is not computed: sparsity, transforms."""
    sparsity, name = config.get("sparsity_config") or {}, str(config.get("format") or "").lower()
    sparse = str(sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity).lower()
    found = next((each for each in (name, sparse) if each in SPARSE_FORMATS or each.startswith("sparse")), None)
    if found is not None:
        raise ValueError(
            f"the checkpoint is sparse ({found[:40]}): zeros are left out, and no products here skip them; use the "
            "model's W4A16, W8A8 or FP8 checkpoint, or save this one with the format dense"
        )
    transforms = config.get("transform_config") or {}
    schemes = transforms.get("config_groups") or {} if isinstance(transforms, Mapping) else {"": None}
    where = [
        str(each.get("location")) if isinstance(each, Mapping) else "an unknown place"
        for scheme in (schemes.values() if isinstance(schemes, Mapping) else [None])
        for each in _transform_locations(scheme)
    ]
    online = next((each for each in where if each not in ("weight_input", "weight_output")), None)
    if online is not None:
        raise ValueError(
            f"the checkpoint transforms activations while it runs (transform_config at {online[:40]}: Hadamard and the "
            "like), which quintet does not; use one without, or whose transforms are all in its weights"
        )


def _transform_locations(scheme: object) -> list[Any]:
    """Returns the places where a transform applies; [None] if they are not understood."""
    entries = (scheme.get("apply") or []) if isinstance(scheme, Mapping) else None
    return entries if isinstance(entries, list) else [None]


def targeted_modules(targets: object, where: str) -> tuple[ModuleNames, bool]:
    """The modules that a group names, and whether it means all products."""
    if not isinstance(targets, list | tuple):
        raise ValueError(f"{where} has targets {targets!r:.60}, not a list of names")
    names = regex_names([each for each in targets if each not in LINEAR_CLASSES], where)
    return names, any(each in LINEAR_CLASSES for each in targets)
