"""Four bits as Quark packs them into int32: along the outputs with groups of inputs, else along the inputs."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.weights import FLOATS, Cut, Form, Matrix, OnFile, Part
from quintet.layers.quantization.block_scales import beside, whole
from quintet.layers.quantization.group_scales import fitted, floats, spread

PACKED = 8  # numbers in an int32
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the i-th 4 bits, from the lowest, are of this one of the eight
SIGN = 8


@dataclass(frozen=True)
class QuarkInt4:
    """With groups: "weight" int32 [K, N / 8], "weight_scale" [G, N], "weight_zero_point" int32 [G, N / 8]; without:
    [N, K / 8], [N] and [N / 8]. Signed numbers have no zero points."""

    group: int
    signed: bool
    reordered: bool = True

    def stored(self, part: Part) -> dict[str, OnFile]:
        outputs, inputs = whole(part)
        group = self.group or inputs
        if outputs % PACKED or inputs % PACKED or inputs % group:
            raise ValueError(f"{part.source} [{outputs}, {inputs}] does not divide into eights, and groups of {group}")
        words = (inputs, outputs // PACKED) if self.group else (outputs, inputs // PACKED)
        lead = (inputs // group,) if self.group else ()
        found = {
            part.source: OnFile(words, (torch.int32,)),
            beside(part, "weight_scale"): OnFile((*lead, outputs), FLOATS),
        }
        if not self.signed:
            found[beside(part, "weight_zero_point")] = OnFile((*lead, outputs // PACKED), (torch.int32,))
        return found

    def form(self, cut: Cut) -> Form:
        return fitted(Form("int4", 4, 16, self.group, zeros=not self.signed), cut)

    def matrix(self, part: Part, cut: Cut, tensors: Mapping[str, Tensor]) -> Matrix:
        form, outputs, inputs = self.form(cut), slice(*cut.outputs), slice(*cut.inputs)
        words = tensors[part.source]
        held = self._apart(words[inputs]).t()[outputs] if self.group else self._apart(words[outputs])[:, inputs]
        held = (held ^ SIGN if self.signed else held).contiguous()
        scales = self._spread(tensors[beside(part, "weight_scale")].float(), cut, form)
        zeros = None
        if not self.signed:
            points = tensors[beside(part, "weight_zero_point")]
            zeros = self._spread(self._apart(points if self.group else points[None]), cut, form)
        return Matrix(held[:, ::2] | held[:, 1::2] << 4, scales, zeros, form=form)

    def floats(self, part: Part, cut: Cut, tensors: Mapping[str, Tensor]) -> Tensor:
        return floats(self, self.group, part, cut, tensors)

    def _spread(self, x: Tensor, cut: Cut, form: Form) -> Tensor:
        """[G, N], or [N] -> [n, G'] of the share."""
        return spread(x.reshape(-1, x.shape[-1]).t()[slice(*cut.outputs)], self.group, form.group, cut.inputs)

    def _apart(self, words: Tensor) -> Tensor:
        """int32 [M, W] -> uint8 [M, 8 W]."""
        held = words.contiguous().view(torch.uint8)
        apart = torch.stack([held & 15, held >> 4], -1).reshape(len(words), -1, PACKED)
        places = torch.tensor(ORDER).argsort() if self.reordered else torch.arange(PACKED)
        return apart[:, :, places].reshape(len(words), -1)
