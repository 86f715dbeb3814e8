"""The quantization schemes that the loader makes of any checkpoint in floating point, and which layer gets which."""

from dataclasses import replace

from quintet.types import Scheme

GROUPS = (128, 64, 32)  # inputs that may share a scale
SCHEMES = {
    "int8": Scheme("int8", 8, 16, 128),
    "int4": Scheme("int4", 4, 16, 32),
    "w8a8": Scheme("w8a8", 8, 8, 0),
    "w4a8": Scheme("w4a8", 4, 8, 32),
}


def scheme(name: str | None, group: int | None) -> Scheme | None:
    """What the user asked for; a group of None is the scheme's own."""
    if name is None:
        return None
    return SCHEMES[name] if group is None else replace(SCHEMES[name], group=group)


def fitting(wanted: Scheme | None, inputs: int) -> Scheme | None:
    """For a product of so many inputs: with a smaller group where that divides them, None where none does."""
    if wanted is None or wanted.group == 0:
        return wanted
    group = next((each for each in GROUPS if each <= wanted.group and inputs % each == 0), None)
    return None if group is None else replace(wanted, group=group)


def of_head(wanted: Scheme | None) -> Scheme | None:
    """For the logits, which show every error: weights in 8 bits, whatever the others have; activations as theirs."""
    if wanted is None:
        return None
    return SCHEMES["int8" if wanted.activations == 16 else "w8a8"]
