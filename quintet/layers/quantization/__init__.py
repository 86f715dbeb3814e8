"""Weight formats of a model's products: from the user's wish, the checkpoint, and what the platform keeps."""

from dataclasses import dataclass, replace

from quintet.interface.weights import PLAIN, ShardRange, WeightFormat, WeightReader
from quintet.layers.quantization.checkpoint_config import CheckpointQuantization
from quintet.layers.quantization.online import ONLINE, OnlineQuantization, RoundedWeights, format_for_inputs

__all__ = ["ONLINE", "QuantizationPlan", "format_for_inputs"]


@dataclass(frozen=True)
class QuantizationPlan:
    """Decides, once it is known which module of the model a product is."""

    online: WeightFormat | OnlineQuantization | None = None  # what floats become while they are loaded
    checkpoint: CheckpointQuantization | None = None
    # kinds (WeightFormat.required_kinds) that the platform keeps; others are dequantized. None: all
    supported_kinds: frozenset[str] | None = None
    activations: int | None = None  # bits that products take of them, 8 or 16; None: what the formats say
    heads: bool = False  # these are of a head, or a table
    tables: bool = False  # rows are looked up in them

    def reader(self, module: str) -> WeightReader | None:
        """Returns the reader of this module of the checkpoint; None if it holds floats."""
        if self.checkpoint is None or (self.heads and not self.checkpoint.heads):
            return None
        return self.checkpoint.plan.reader(module)

    def format_for(self, module: str, shard: ShardRange) -> tuple[WeightFormat, WeightReader | None]:
        """For a product with this module of the checkpoint, and this share of it."""
        reader = self.reader(module)
        if reader is None:
            return self._made(module, shard.inputs[1] - shard.inputs[0])
        fmt = reader.format(shard).with_activations(self.activations)
        for held in (fmt, fmt.float_activations):
            if self._supports(held):
                return held, reader
        return PLAIN, reader

    def _supports(self, fmt: WeightFormat) -> bool:
        """True if the platform keeps the format. A table needs "embedding" too: it stays plain where `kept` is None."""
        if self.tables:
            return self.supported_kinds is not None and fmt.required_kinds | {"embedding"} <= self.supported_kinds
        return self.supported_kinds is None or fmt.required_kinds <= self.supported_kinds

    def _made(self, module: str, inputs: int) -> tuple[WeightFormat, WeightReader | None]:
        """Returns the format of floats; where a platform does not keep it, they are rounded to it and stay floats."""
        wanted = self.online.format_for(module) if isinstance(self.online, OnlineQuantization) else self.online
        fmt = format_for_inputs(wanted, inputs).with_activations(self.activations)
        for held in (fmt, fmt.float_activations):
            if held.plain or self._supports(held):
                return held, None
        return PLAIN, RoundedWeights(fmt)

    def for_head(self) -> "QuantizationPlan":
        """For the logits, which show every error: weights in 8 bits, whatever the others have, and activations as
        theirs. Most checkpoints keep a head's floats."""
        if self.online is None:
            return replace(self, heads=True)
        if isinstance(self.online, OnlineQuantization):
            return replace(self, online=self.online.head, heads=True)
        return QuantizationPlan(ONLINE["int8" if self.online.activations == 16 else "w8a8"])

    def for_encoder(self, checkpoint: CheckpointQuantization | None = None) -> "QuantizationPlan":
        """For encoders of media: floats become what a head's do. `checkpoint`: of a file of the encoder's own."""
        if checkpoint is not None:
            return replace(self, checkpoint=checkpoint, activations=self.activations or checkpoint.activations)
        if self.online is None or self.for_head().online is None:
            return QuantizationPlan()
        return replace(self.for_head(), heads=False, supported_kinds=self.supported_kinds)

    def for_embedding(self) -> "QuantizationPlan":
        """For rows that are looked up: in the format that a head has which shares their tensors."""
        return replace(self, online=None, heads=True, tables=True)
