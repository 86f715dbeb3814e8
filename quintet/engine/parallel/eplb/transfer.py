"""Moves experts from rank to rank, between two steps: copies their weights as they are stored."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quintet.layers.moe.expert_placement import Placement
from quintet.layers.moe.moe import Experts

PLACEMENT_TENSORS = ("places", "loads")  # tensors of a layer that belong to no expert


class ExpertMove:
    """One rank's part of a layer that changes: making it fetches all that the rank needs, and writes nothing.

    Every rank makes one at the same time. A failure then has changed nothing.
    """

    def __init__(self, layer: Experts, new: Placement) -> None:
        assert layer.rank_experts is not None, "experts that are cut stay where they are"
        self._layer, self._dealt, self._new = layer, layer.rank_experts, new
        self._rows: dict[str, dict[int, Tensor]] = {}  # by stack and expert: the parts that this rank will hold
        self._table = layer.rank_experts.table(new)
        rounds = _send_rounds(layer.rank_experts.placement, new)
        for name, stack in self._stacks():
            self._rows[name] = self._fetched(stack, rounds)

    def _stacks(self) -> list[tuple[str, Tensor]]:
        """Returns the stacks, in an order that all ranks have."""
        found = sorted(
            (name, each) for name, each in self._layer.assigned_tensors.items() if name not in PLACEMENT_TENSORS
        )
        assert all(len(each) == len(self._dealt.local_experts) for _, each in found), (
            "a stack has a part for each expert"
        )
        return found

    def _fetched(self, stack: Tensor, rounds: Sequence[Sequence[tuple[int, int] | None]]) -> dict[int, Tensor]:
        own, wanted = self._dealt.local_experts, self._new[self._dealt.rank]
        found = {expert: stack[own.index(expert)].clone() for expert in wanted if expert in own}
        for sent in rounds:
            mine = sent[self._dealt.rank]
            part = stack[0 if mine is None else mine[1]].contiguous()  # a rank with nothing to send sends any part
            every = self._layer.comm.all_gather(part.reshape(-1).view(torch.uint8)[None], 0)
            for rank, each in enumerate(sent):
                if each is not None and each[0] in wanted and each[0] not in own:
                    found[each[0]] = every[rank].clone().view(part.dtype).reshape(part.shape)
        return found

    def write(self) -> int:
        """Writes into the stacks, which keep their addresses -> how many experts came from other ranks."""
        own, wanted = self._dealt.local_experts, self._new[self._dealt.rank]
        changed = [place for place, expert in enumerate(wanted) if expert != own[place]]
        with torch.inference_mode():
            for name, stack in self._stacks():
                for place in changed:
                    stack[place].copy_(self._rows[name][wanted[place]])
            self._layer.places.copy_(self._table)
        self._dealt.placement = self._new
        return sum(expert not in own for expert in wanted)


def _send_rounds(now: Placement, new: Placement) -> list[list[tuple[int, int] | None]]:
    """Returns, for each round, the (expert, its place) that each rank sends to all. An expert is sent once, by the rank
    that has sent the least."""
    lacking = sorted({expert for own, wanted in zip(now, new, strict=True) for expert in set(wanted) - set(own)})
    queues = [list[tuple[int, int]]() for _ in now]
    for expert in lacking:
        rank = min((rank for rank, own in enumerate(now) if expert in own), key=lambda rank: len(queues[rank]))
        queues[rank].append((expert, now[rank].index(expert)))
    return [
        [queue[index] if index < len(queue) else None for queue in queues]
        for index in range(max(map(len, queues), default=0))
    ]
