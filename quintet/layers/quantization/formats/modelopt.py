"""NVIDIA Model Optimizer's checkpoints, by its algorithms; of config.json or of hf_quant_config.json beside it."""

from collections.abc import Callable, Mapping
from typing import Any

from quintet.interface.weights import StoredTensor, WeightReader
from quintet.layers.quantization import fp4_fp8 as minifloats
from quintet.layers.quantization.block_scales import BlockScales
from quintet.layers.quantization.fp4_fp8 import Float8Weights
from quintet.layers.quantization.integers import IntWeights
from quintet.layers.quantization.module_patterns import CheckpointModules, ListedPlan, ModuleNames, wildcard_names

BLOCK = 128  # outputs and inputs, of FP8_PB_WO
MIXED_PRECISION = "MIXED_PRECISION"
MAX_ENTRIES = 2**20  # inputs of a group, and modules that are listed


def _nvfp4(group: int) -> WeightReader:
    return minifloats.nvfp4("weight", "weight_scale_2", divides=False, block=group or minifloats.SMALL_BLOCK)


ALGORITHMS: Mapping[str, Callable[[int], WeightReader]] = {  # of a group's size, 0 where none is given
    "FP8": lambda group: Float8Weights(BlockScales(0, 0)),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda group: Float8Weights(BlockScales(1, 0)),
    "FP8_PB_WO": lambda group: Float8Weights(BlockScales(BLOCK, BLOCK)),
    "MXFP4": lambda group: minifloats.mxfp4("weight"),
    "MXFP8": lambda group: minifloats.mxfp8(),
    "NVFP4": _nvfp4,
    "W4A16_NVFP4": _nvfp4,
    "W4A8_MXFP4_FP8": lambda group: minifloats.mxfp4("weight"),
    "W4A8_NVFP4_FP8": _nvfp4,
    "W8A16": lambda group: IntWeights(8, BlockScales(1, 0)),
}
IGNORED_SUFFIXES = (
    ".input_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".k_bmm_quantizer",
    ".v_bmm_quantizer",
    ".output_scale",
)
NOTE = "activations stay in the model's type, whatever ModelOpt's algorithm means for them"


def plan(config: Mapping[str, Any], files: Mapping[str, StoredTensor]) -> ListedPlan:
    """Reads a quantization_config, or what hf_quant_config.json has. ValueError says what in it is not read."""
    entry = config.get("quantization", config)
    if not isinstance(entry, Mapping):
        raise ValueError(f"ModelOpt's quantization is {entry!r:.60}, not an object; correct hf_quant_config.json")
    left_out = entry.get("exclude_modules", entry.get("ignore")) or []
    if not isinstance(left_out, list):
        raise ValueError(f"ModelOpt's exclude_modules is {left_out!r:.60}, not a list of names")
    ignored = wildcard_names(left_out, "ModelOpt's exclude_modules")
    if str(entry.get("quant_algo")).upper() != MIXED_PRECISION:
        return ListedPlan((), _reader(entry, "the checkpoint"), ignored, CheckpointModules(files))
    layers = entry.get("quantized_layers")
    if not isinstance(layers, Mapping) or len(layers) > MAX_ENTRIES:
        raise ValueError(f"ModelOpt's quantized_layers is {layers!r:.60}, not an object with a layer for each key")
    held: dict[WeightReader, set[str]] = {}
    for name, how in layers.items():
        if not isinstance(how, Mapping):
            raise ValueError(f"ModelOpt's quantized_layers has {how!r:.60} for {str(name)[:80]}, not an object")
        held.setdefault(_reader(how, str(name)[:80]), set()).add(str(name))
    return ListedPlan(
        tuple((ModuleNames(frozenset(names)), how) for how, names in held.items()),
        None,
        ignored,
        CheckpointModules(files),
    )


def _reader(entry: Mapping[str, Any], where: str) -> WeightReader:
    algorithm, group = str(entry.get("quant_algo")).upper()[:60], entry.get("group_size") or 0
    if algorithm not in ALGORITHMS:
        scaled = " (its inputs are scaled before products)" * any(each in algorithm for each in ("AWQ", "SQ", "SVD"))
        raise ValueError(
            f"{where} is of ModelOpt's {algorithm}{scaled}, which quintet does not read; it reads "
            f"{', '.join(sorted(ALGORITHMS))} and {MIXED_PRECISION}"
        )
    if type(group) is not int or not 0 <= group <= MAX_ENTRIES or group % 16:
        raise ValueError(f"{where} has ModelOpt's group_size {group!r:.40}, which is no multiple of 16")
    return ALGORITHMS[algorithm](group)
