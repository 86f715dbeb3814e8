"""Reference model that a check compares with, and the sizes that such models have."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB = 101  # odd, so that no number of ranks divides it
LENGTH = 256  # positions that the models are made for
SERVED = 128  # positions that the tests use, unless they say otherwise


@dataclass(frozen=True)
class Tiny:
    """A checkpoint on disk, the config that is read from it, and transformers' model of it in float32."""

    folder: Path
    config: Any
    reference: Any

    @property
    def text(self) -> Any:
        """The configuration of what is served: of a wrapper, the language model's."""
        return self.config.get_text_config()

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[T, vocab], one request alone, without a cache."""
        with torch.no_grad():
            out: Tensor = self.reference(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return out.float()

    def exact(self, ids: Sequence[int]) -> Tensor:
        """The same, computed in doubles."""
        return replace(self, reference=copy.deepcopy(self.reference).double()).logits(ids)

    def states(self, ids: Sequence[int]) -> list[Tensor]:
        """[T, H] each: normalised hidden states, then what goes into the first layer and comes out of each."""
        trunk, last = self.reference.get_decoder(), []
        blocks = trunk.layers if hasattr(trunk, "layers") else trunk.h
        hook = blocks[-1].register_forward_hook(lambda block, given, out: last.append(out))
        with torch.no_grad():
            found = trunk(torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True).hidden_states
        hook.remove()
        behind = last[0][0] if isinstance(last[0], tuple) else last[0]
        return [each.float().reshape(len(ids), -1) for each in (found[-1], *found[:-1], behind)]
