"""Which form each product of a model has: of the user's wish, of the checkpoint, and of what the platform keeps."""

from dataclasses import dataclass, replace

from quintet.layers.forms.checkpoint import Quantized
from quintet.layers.forms.wishes import ONLINE, Rounded, Wish, fitting
from quintet.weights import PLAIN, Cut, Form, Reader

__all__ = ["ONLINE", "Forms", "fitting"]


@dataclass(frozen=True)
class Forms:
    """Decides, once it is known which module of the model a product is."""

    wanted: Form | Wish | None = None  # what floats become while they are loaded
    checkpoint: Quantized | None = None
    kept: frozenset[str] | None = None  # what the platform keeps of Form.needs; other forms are dequantized. None: all

    activations: int | None = None  # bits that products take of them, 8 or 16; None: what the forms say

    heads: bool = False  # these are of a head, or a table
    tables: bool = False  # rows are looked up in them

    def reader(self, module: str) -> Reader | None:
        """Of this module of the checkpoint; None if it holds floats."""
        if self.checkpoint is None or (self.heads and not self.checkpoint.heads):
            return None
        return self.checkpoint.plan.reader(module)

    def of(self, module: str, cut: Cut) -> tuple[Form, Reader | None]:
        """For a product with this module of the checkpoint, and this share of it."""
        reader = self.reader(module)
        if reader is None:
            return self._made(module, cut.inputs[1] - cut.inputs[0])
        form = reader.form(cut).taking(self.activations)
        for held in (form, form.exact):
            if self._keeps(held):
                return held, reader
        return PLAIN, reader

    def _keeps(self, form: Form) -> bool:
        """A table's rows have to be looked up in it, too: who says nothing of what is kept does not say that either."""
        if self.tables:
            return self.kept is not None and form.needs | {"rows"} <= self.kept
        return self.kept is None or form.needs <= self.kept

    def _made(self, module: str, inputs: int) -> tuple[Form, Reader | None]:
        """Of floats; those that a platform does not keep are rounded to the form, and stay floats."""
        wanted = self.wanted.of(module) if isinstance(self.wanted, Wish) else self.wanted
        form = fitting(wanted, inputs).taking(self.activations)
        for held in (form, form.exact):
            if held.plain or self._keeps(held):
                return held, None
        return PLAIN, Rounded(form)

    def of_head(self) -> "Forms":
        """For the logits, which show every error: weights in 8 bits, whatever the others have, and activations as
        theirs. Most checkpoints keep a head's floats."""
        if self.wanted is None:
            return replace(self, heads=True)
        if isinstance(self.wanted, Wish):
            return replace(self, wanted=self.wanted.head, heads=True)
        return Forms(ONLINE["int8" if self.wanted.activations == 16 else "w8a8"])

    def of_table(self) -> "Forms":
        """For rows that are looked up: in the form that a head has which shares their tensors."""
        return replace(self, wanted=None, heads=True, tables=True)
