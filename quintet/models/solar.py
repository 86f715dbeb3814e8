"""Solar Pro (Upstage 2024): Llama, where some layers read what went into earlier ones as well."""

import reprlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quintet.layers.build import BuildContext
from quintet.layers.decoder import BlockFactory, DecoderTrunk, run_residual_layers
from quintet.layers.layer_state import StepState
from quintet.models.llama import LlamaForCausalLM


class SolarModel(DecoderTrunk):
    """Keeps the inputs of the layers bskcn_1 and bskcn_2, and mixes them into the inputs of the layers bskcn_3 and
    bskcn_4: bskcn_tv[1] is the share of the kept ones."""

    def __init__(self, config: Any, build: BuildContext, block: BlockFactory) -> None:
        super().__init__(config, build, block)
        self._kept, self._mixed = (config.bskcn_1, config.bskcn_2), (config.bskcn_3, config.bskcn_4)
        self._share, self._width = _share(config), config.hidden_size
        _check(config, self._kept, self._mixed, self._share)

    def reads(self, at: int) -> tuple[int, ...]:
        """Widths of what the layers before keep for those from here on."""
        return (self._width,) * len(self._awaited(at))

    def _awaited(self, at: int) -> list[int]:
        """Returns which of the two are kept before this layer, and mixed into it or a later one."""
        both = enumerate(zip(self._kept, self._mixed, strict=True))
        return [which for which, (keeps, mixes) in both if mixes and max(mixes) >= at > min(keeps)]

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        build, stage = self._build, self._build.stage
        handed = cache.shared_tensors(build.dtype, self.reads(stage.start))
        kept: dict[int, Tensor] = dict(zip(self._awaited(stage.start), handed, strict=True))

        def joint(index: int, x: Tensor) -> Tensor:
            for which, layers in enumerate(self._kept):
                if index in layers:
                    kept[which] = x
            for which, layers in enumerate(self._mixed):
                if index in layers:
                    x = self._mix(
                        kept[which], x.clone() if index in self._build.requested_outputs.aux_hidden_states else x
                    )
            return x

        joints = {index: joint for each in (*self._kept, *self._mixed) for index in each}
        x = self.embed_tokens.embed(cache.batch) if stage.first else None
        out = run_residual_layers(self.layers, self.norm, x, cache, build, joints)
        cache.send_shared(kept[which] for which in self._awaited(stage.stop))
        return out

    def _mix(self, early: Tensor, late: Tensor) -> Tensor:
        """share * early + (1 - share) * late, written over late: early may be wanted again."""
        of_late = self._ops.scale(late, (1 - self._share) / self._share)
        mixed: Tensor = self._ops.scale(self._ops.add(of_late, early), self._share)
        return mixed


def _share(config: Any) -> float:
    """The second of bskcn_tv: the first is for training."""
    share = config.bskcn_tv
    if not isinstance(share, list) or len(share) != 2 or not all(isinstance(each, int | float) for each in share):
        raise ValueError(
            f"{config.model_type}'s bskcn_tv is {reprlib.repr(share)}, not two numbers; correct config.json"
        )
    return float(share[1])


def _check(config: Any, kept: Sequence[list[int]], mixed: Sequence[list[int]], share: float) -> None:
    for keeps, mixes in zip(kept, mixed, strict=True):
        if mixes and (not keeps or min(keeps) > min(mixes)):
            raise ValueError(f"{config.model_type} mixes into layer {min(mixes)} what no layer before it keeps")
    if both := {*kept[0], *kept[1]} & {*mixed[0], *mixed[1]}:
        raise ValueError(f"{config.model_type} keeps and mixes what goes into layer {min(both)}: that is not supported")
    if not 0 < share < 1:
        raise ValueError(
            f"{config.model_type} with bskcn_tv={config.bskcn_tv} is not supported: shares are within 0, 1"
        )


class SolarForCausalLM(LlamaForCausalLM):
    """The same blocks."""

    model: SolarModel

    def _trunk(self, config: Any, build: BuildContext, block: BlockFactory) -> DecoderTrunk:
        return SolarModel(config, build, block)

    def shared_tensor_widths(self, at: int) -> tuple[int, ...]:
        """Widths of the kept inputs that layers from here on mix in."""
        return self.model.reads(at)
