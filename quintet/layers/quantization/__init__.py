"""Weight formats of a model's products: from the user's wish, the checkpoint, and what the platform keeps."""

from dataclasses import dataclass, replace

from quintet.interface.weights import PLAIN, Cut, Form, Reader
from quintet.layers.quantization.checkpoint_config import Quantized
from quintet.layers.quantization.online import ONLINE, OnlineQuantization, RoundedWeights, fitting

__all__ = ["ONLINE", "Forms", "fitting"]


@dataclass(frozen=True)
class QuantizationPlan:
    """Decides, once it is known which module of the model a product is."""

    wanted: Form | OnlineQuantization | None = None  # what floats become while they are loaded
    checkpoint: Quantized | None = None
    kept: frozenset[str] | None = None  # what the platform keeps of Form.needs; other forms are dequantized. None: all

    activations: int | None = None  # bits that products take of them, 8 or 16; None: what the forms say

    heads: bool = False  # these are of a head, or a table
    tables: bool = False  # rows are looked up in them

    def reader(self, module: str) -> Reader | None:
        """Returns the reader of this module of the checkpoint; None if it holds floats."""
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
        """True if the platform keeps the form. A table needs "rows" too: it stays plain where `kept` is None."""
        if self.tables:
            return self.kept is not None and form.needs | {"rows"} <= self.kept
        return self.kept is None or form.needs <= self.kept

    def _made(self, module: str, inputs: int) -> tuple[Form, Reader | None]:
        """Returns the form of floats; where a platform does not keep it, they are rounded to it and stay floats."""
        wanted = self.wanted.of(module) if isinstance(self.wanted, OnlineQuantization) else self.wanted
        form = fitting(wanted, inputs).taking(self.activations)
        for held in (form, form.exact):
            if held.plain or self._keeps(held):
                return held, None
        return PLAIN, RoundedWeights(form)

    def of_head(self) -> "QuantizationPlan":
        """For the logits, which show every error: weights in 8 bits, whatever the others have, and activations as
        theirs. Most checkpoints keep a head's floats."""
        if self.wanted is None:
            return replace(self, heads=True)
        if isinstance(self.wanted, OnlineQuantization):
            return replace(self, wanted=self.wanted.head, heads=True)
        return QuantizationPlan(ONLINE["int8" if self.wanted.activations == 16 else "w8a8"])

    def of_table(self) -> "QuantizationPlan":
        """For rows that are looked up: in the form that a head has which shares their tensors."""
        return replace(self, wanted=None, heads=True, tables=True)
