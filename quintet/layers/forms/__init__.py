"""Which form each product of a model has: of the user's wish, of the checkpoint, and of what the platform keeps."""

from dataclasses import dataclass, replace

from quintet.config import SCHEMES
from quintet.layers.forms.checkpoint import Quantized
from quintet.weights import PLAIN, Cut, Form, Reader

GROUPS = (128, 64, 32)  # inputs that may share a scale, of floats that are quantized
ONLINE = {name: Form(name, *numbers) for name, numbers in SCHEMES.items()}


@dataclass(frozen=True)
class Forms:
    """Decides, once it is known which module of the model a product is."""

    wanted: Form | None = None  # what floats become while they are loaded
    checkpoint: Quantized | None = None
    kept: frozenset[str] | None = None  # what the platform keeps of Form.needs; other forms are dequantized. None: all

    activations: int | None = None  # bits that quantized ones of a checkpoint take, 8 or 16; None: as it says

    heads: bool = False  # these are of a head, or a table

    def reader(self, module: str) -> Reader | None:
        """Of this module of the checkpoint; None if it holds floats."""
        if self.checkpoint is None or (self.heads and not self.checkpoint.heads):
            return None
        return self.checkpoint.plan.reader(module)

    def of(self, module: str, cut: Cut) -> tuple[Form, Reader | None]:
        """For a product with this module of the checkpoint, and this share of it."""
        reader = self.reader(module)
        if reader is None:
            return fitting(self.wanted, cut.inputs[1] - cut.inputs[0]), None
        form = reader.form(cut).taking(self.activations)
        for held in (form, form.exact):
            if self.kept is None or held.needs <= self.kept:
                return held, reader
        return PLAIN, reader

    def of_head(self) -> "Forms":
        """For the logits, which show every error: weights in 8 bits, whatever the others have, and activations as
        theirs. Most checkpoints keep a head's floats."""
        if self.wanted is None:
            return replace(self, heads=True)
        if self.wanted.kind == "w8a8":
            return Forms(self.wanted)
        return Forms(ONLINE["int8" if self.wanted.activations == 16 else "w8a8"])

    def of_table(self) -> "Forms":
        """For rows that are looked up."""
        return replace(self, wanted=None, heads=True)


def online(name: str | None, group: int | None) -> Form | None:
    """What the user asked for; a group of None is the scheme's own."""
    if name is None:
        return None
    return ONLINE[name] if group is None else replace(ONLINE[name], group=group)


def fitting(wanted: Form | None, inputs: int) -> Form:
    """For a product of so many inputs: with a smaller group where that divides them, plain where none does."""
    if wanted is None:
        return PLAIN
    if wanted.group == 0:
        return wanted
    group = next((each for each in GROUPS if each <= wanted.group and inputs % each == 0), None)
    return PLAIN if group is None else replace(wanted, group=group)
