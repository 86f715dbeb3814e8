"""The adapters (LoRA) of the step that runs: which one each row of a product has."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quintet.interface.types import Batch

ALL_MODULES = "all"  # of lora_target_modules
LORA_POOL = "lora"  # the module beside a product or a table that holds adapters


@dataclass(frozen=True)
class LoRASizes:
    """Room for adapters on the device."""

    max_loras: int  # S: adapters of one batch
    max_rank: int  # R: rows of one adapter
    by_torch: bool = False  # torch can write to what the device holds
    # ends of names of the modules that adapters may change; ALL_MODULES: all; None: all but experts
    targets: tuple[str, ...] | None = None
    experts: bool = False  # the platform serves adapters of experts


class LoRAStep:
    """Adapters of the rows that products of the running step take: of all tokens, and at the end of the step's output
    rows alone."""

    def __init__(self) -> None:
        self.slots: Tensor | None = None  # [T] or [L] int32: 1 + an adapter's place in the pools, 0: none; None: no row
        self.extras: Tensor | None = None  # the same of adapters that have more than the A and B of products
        self._output_rows: Tensor | None = None  # [L], as long as rows are those of all tokens

    def begin(self, batch: Batch) -> None:
        """Called at the top of a step."""
        self.slots, self.extras = batch.inputs.adapters, batch.inputs.adapter_extras
        self._output_rows = None if batch.one_token_per_request else batch.logits_indices

    def select_output_rows(self, take_rows: Callable[[Tensor, Tensor], Tensor]) -> None:
        """From now on rows are those that outputs are computed for."""
        if self._output_rows is not None:
            self.slots, self.extras = (
                None if each is None else take_rows(each[:, None], self._output_rows)[:, 0]
                for each in (self.slots, self.extras)
            )
        self._output_rows = None
