"""What a checkpoint says of its quantization (quantization_config in config.json), and what reads its products."""

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quintet.layers.forms import awq, fp8
from quintet.weights import Reader

# quant_method -> what reads it. One that is not here is refused before a file is opened.
METHODS: Mapping[str, Callable[[Mapping[str, Any]], Reader]] = {"awq": awq.read, "fp8": fp8.read}
IGNORED = ("modules_to_not_convert", "ignored_layers")  # where a configuration lists what stayed in floats


@dataclass(frozen=True)
class Quantized:
    """A checkpoint's quantization, and what it left out."""

    method: str
    how: Reader
    ignored: tuple[str, ...] = ()  # names of modules, or their beginnings or ends; ".*" for anything between

    def reader(self, modules: Sequence[str]) -> Reader | None:
        """Of a product that is made of these modules; None if they hold floats."""
        left = [name for name in modules if self._ignores(name)]
        if left and len(left) < len(modules):
            raise ValueError(
                f"{', '.join(left)} stayed in floats in this checkpoint and {', '.join(set(modules) - set(left))} did "
                "not, and quintet computes them as one product; quantize all of them or none"
            )
        return None if left else self.how

    def _ignores(self, module: str) -> bool:
        return any(_pattern(each).search(module) for each in self.ignored)


def quantized(config: Mapping[str, Any] | None) -> Quantized | None:
    """Of a quantization_config; None where there is none. ValueError says what in it is not understood."""
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config is {reprlib.repr(config)}, not an object; correct config.json")
    method = _method(config)
    if method not in METHODS:
        raise ValueError(
            f"the checkpoint is quantized by {method}, which quintet does not read; it reads {_known()}, and floats, "
            "which quantization= makes smaller while they are loaded: use the model's original, or one of these"
        )
    lists = [config.get(key) or [] for key in IGNORED]
    ignored = [name for each in lists for name in (each if isinstance(each, list | tuple) else [each])]
    for name in ignored:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"quantization_config leaves out {reprlib.repr(name)}, which is no module's name")
    return Quantized(method, METHODS[method](config), tuple(ignored))


def _method(config: Mapping[str, Any]) -> str:
    """The first checkpoints of bitsandbytes do not name it."""
    unnamed = "bitsandbytes" if config.get("load_in_8bit") or config.get("load_in_4bit") else "without a name"
    return " ".join(str(config.get("quant_method") or unnamed).lower().split())[:80]


def _known() -> str:
    return ", ".join(sorted(METHODS))


_NAME = re.compile(r"(re:)?[\^]?[\w\-.*\\]+\$?")  # of a module, or one with ".*" in it


def _pattern(name: str) -> re.Pattern[str]:
    """Whole parts of a path: "mlp.gate" is in "layers.3.mlp.gate", and not in "layers.3.mlp.gate_proj"."""
    plain = name.removeprefix("re:").strip("^$").replace("\\.", ".")
    return re.compile(rf"(^|\.){'.*'.join(re.escape(piece) for piece in plain.split('.*'))}(\.|$)")
