"""The emulated hardware: what a driver would say about it, and what `ACME_CHIP` may say instead."""

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from quintet.common.suggestions import refuse_unknown

FP8 = torch.float8_e4m3fnuz  # its largest number is 240, it has no -0 and no infinities


@dataclass
class Chip:
    """One machine's devices, all alike."""

    devices: int = 4
    memory: int = 2**30  # bytes of each
    broken: str = ""  # why the driver does not start, if it does not


def read(path: str | None) -> Chip:
    """The chip that a JSON file describes, such as {"devices": 2, "memory": 268435456}; all of it may be left out."""
    given = json.loads(Path(path).read_text()) if path else {}
    refuse_unknown("entry of ACME_CHIP", given, [each.name for each in fields(Chip)])
    return Chip(**given)


CHIP = read(os.environ.get("ACME_CHIP"))  # tests may set its fields before they open a device
