"""Options of `quintet quantize`."""

from dataclasses import dataclass
from typing import Any

from quintet.common.value_parsers import boolean, count, fraction, list_of, one_of, optional, text
from quintet.config import option
from quintet.config.schema.fields import normalize_fields

METHODS = ("rtn", "gptq", "awq")
GROUP = "quantization"
CALIBRATION = "calibration, of gptq, awq and FP8"
REPORT = "report"


def _group(value: Any) -> int | None:
    return None if value is None else int(count(1, -1)(value))


@dataclass(frozen=True)
class QuantizeConfig:
    """Checked by itself; ValueError names the field."""

    output: str = option(
        None, optional(text), "the folder to write, which must not be there yet", group=GROUP, flags=("-o",),
        metavar="DIR",
    )  # fmt: skip
    scheme: str = option(
        "W4A16", text, "how weights are held, by compressed-tensors' name or llama.cpp's", group=GROUP, metavar="NAME"
    )
    method: str = option(
        "rtn", one_of(*METHODS), "how they are rounded: to nearest, or with calibration", group=GROUP, choices=METHODS
    )
    group_size: int | None = option(
        None, _group, "inputs that share a scale, where the scheme has groups; -1: all of an output's", group=GROUP
    )
    ignore: tuple[str, ...] = option(
        ("lm_head",), list_of(text), "module that stays as it is: a name, the end of one, or re: and a pattern",
        group=GROUP, metavar="MODULE",
    )  # fmt: skip
    overwrite: bool = option(False, boolean, "replace a model that is in the folder already", group=GROUP)
    calibration: str | None = option(
        None, optional(text), "text such as the model will see: a sample per line, or .jsonl with text or messages",
        group=CALIBRATION, metavar="FILE",
    )  # fmt: skip
    num_samples: int = option(256, count(), "sequences of it that are used", group=CALIBRATION)
    sequence_length: int = option(512, count(16), "tokens of each", group=CALIBRATION)
    dampening: float = option(
        0.01, fraction, "added to the diagonal of gptq's Hessian, as a share of its mean", group=CALIBRATION
    )
    act_order: bool = option(
        False, boolean, "gptq rounds the inputs of the largest magnitude first; groups stay where they are",
        group=CALIBRATION,
    )  # fmt: skip
    report: bool = option(True, boolean, "compare the result with the original", group=REPORT)
    evaluate: str | None = option(
        None, optional(text), "text to compare on, not that of the calibration; without it, the model's own words",
        group=REPORT, metavar="FILE",
    )  # fmt: skip
    json: str | None = option(None, optional(text), "write the report to this file too", group=REPORT, metavar="FILE")
    device: str = option("auto", text, "platform to compare on", group=REPORT, metavar="NAME")

    def __post_init__(self) -> None:
        normalize_fields(self)
        if self.output is None:
            raise ValueError("output is missing: the folder to write (-o DIR)")
        if self.act_order and self.method != "gptq":
            raise ValueError(f"act_order is of method 'gptq', not of {self.method!r}; leave it out")
        if self.method != "rtn" and self.calibration is None:
            raise ValueError(
                f"method {self.method!r} needs calibration: some hundred samples of text such as the model will see, "
                "one per line (--calibration FILE); 'rtn' needs none"
            )
