"""The mixer that is made of the bound ops, for every kind of layer that mixes positions."""

from quintet.interface.platform import Mixer
from quintet.interface.types import AttentionSpec, StateSpec
from quintet.ops import attention
from quintet.ops.registry import Ops
from quintet.ops.states import StateMixer


def mixer(spec: AttentionSpec | StateSpec, ops: Ops) -> Mixer:
    """Attention over pages or over a step alone, or a state per request."""
    return StateMixer(spec, ops) if isinstance(spec, StateSpec) else attention.mixer(spec, ops)
