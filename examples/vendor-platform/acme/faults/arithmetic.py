"""Faults of kernels, of draws and of what ranks add up."""

from collections.abc import Callable
from typing import Any

import torch
from quintet.contract import Op
from torch import Tensor

from acme.faults import fault
from acme.kernels import TILE


def of_op(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A change of kernels.of for one op alone. A kernel is made once: shapes are remembered by it."""

    def of_changed(of: Any) -> Any:
        faulty = change(of(Op.registry[name]))
        return lambda op: faulty if op.name == name else of(op)

    return of_changed


def _with_float32(activate: Any) -> Any:
    return lambda x, kind: activate(x, kind).float()


def _without_last_row(product: Any) -> Any:
    def faulty(x: Tensor, *rest: Any) -> Tensor:
        y: Tensor = product(x, *rest)
        y[-1:] = 0
        return y

    return faulty


def _spreading(product: Any) -> Any:
    return lambda x, *rest: product(x, *rest) + (0 * x.sum()).to(x.dtype)


def _split_by_rows(tiled: Any) -> Any:
    def faulty(x: Tensor, packed: Tensor) -> Tensor:
        half = x.shape[1] // 2
        if len(x) <= TILE:
            return tiled(x, packed)
        return tiled(x[:, :half], packed[:half]) + tiled(x[:, half:], packed[half:])

    return faulty


def _first_scale(product: Any) -> Any:
    return lambda x, weight, scales, bias: product(x, weight, scales[:, :1], bias)


def _at_position_0(sample: Any) -> Any:
    def faulty(logits: Tensor, draw: Any, width: int) -> Tensor:
        return sample(logits, draw._replace(positions=torch.zeros_like(draw.positions)), width)

    return faulty


def _ranks_from_0(top: Any) -> Any:
    def faulty(*args: Any) -> Any:
        ids, values, ranks = top(*args)
        return ids, values, ranks - 1

    return faulty


def _not_banned(ban: Any) -> Any:
    return lambda logits, rows, ids: logits.clone()


def _without_last_rank(total: Any) -> Any:
    def faulty(self: Any, x: Tensor) -> Tensor:
        return torch.stack(self._room.exchange(self.rank, x)[:-1]).sum(0)

    return faulty


def _backwards(joined: Any) -> Any:
    def faulty(self: Any, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._room.exchange(self.rank, x)[::-1], dim)

    return faulty


fault(
    "wrong-dtype", "Activations give float32 whatever they are given.", "ops.specification",
    ("kernels:of", of_op("activate", _with_float32)),
)  # fmt: skip
fault("lost-row", "A product's last row is not computed.", "ops.placed", ("kernels:product", _without_last_row))
fault("nan-spreads", "A NaN in one row of a product is in all rows.", "ops.finite", ("kernels:product", _spreading))
fault(
    "split-by-batch", "Products of many rows add up in two halves; batch invariance is declared all the same.",
    "oracle.invariant", ("kernels:tiled", _split_by_rows),
)  # fmt: skip
fault(
    "lost-scales",
    "int8 weights all have their first group's scale.",
    "ops.placed",
    ("kernels:product_int8", _first_scale),
)
fault(
    "draw-ignores-position", "A draw is the same at every position of a request.", "sampling.draws",
    ("kernels:of", of_op("sample", _at_position_0)),
)  # fmt: skip
fault(
    "rank-off-by-one", "Ranks of tokens count from 0.", "sampling.logprobs",
    ("kernels:of", of_op("top_logprobs", _ranks_from_0)),
)  # fmt: skip
fault(
    "ban-ignored",
    "Banned tokens keep their logits.",
    "sampling.edits",
    ("kernels:of", of_op("ban_tokens", _not_banned)),
)
fault(
    "reduce-drops-rank", "all_reduce leaves out the last rank.", "communicator.collectives",
    ("comm:AcmeCommunicator._sum", _without_last_rank),
)  # fmt: skip
fault(
    "gather-order", "all_gather joins the ranks backwards.", "communicator.collectives",
    ("comm:AcmeCommunicator._joined", _backwards),
)  # fmt: skip
