"""The mixer of an indexer that chooses tokens: its ops are in quintet/ops/attention.py."""

from torch import Tensor

from quintet.interface.choices import TokenChoiceSpec
from quintet.interface.platform import Mixer, State
from quintet.interface.types import Layout, StepContext
from quintet.ops.registry import Ops


class TokenChoice(Mixer):
    """write_kv of an indexer's keys, then choose_tokens or choose_pools. Called as a StateSpec's mixer: with (q,
    weights, k), of pools the offsets, too, and no settings."""

    def __init__(self, spec: TokenChoiceSpec, ops: Ops) -> None:
        self.layouts = (Layout(spec.dtype, (1, 1, spec.page_size, spec.head_dim)),)
        self._count, self._write = spec.count, ops.write_kv
        self._choose = ops.choose_pools if spec.pool else ops.choose_tokens

    def __call__(  # type: ignore[override]  # what it is called with is an op's
        self, given: tuple[Tensor, ...], settings: tuple[()], state: State, context: StepContext
    ) -> tuple[Tensor, State]:
        q, weights, k, *offsets = given
        keys = self._write(state[0], k, None, context)
        return self._choose(q, weights, keys, *offsets, context, self._count), (keys,)
