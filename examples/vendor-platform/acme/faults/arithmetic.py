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


def _tf32(product: Any) -> Any:
    """Inputs as a matrix unit takes them: 10 bits behind the point."""

    def cut(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return x
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    return lambda x, packed, bias: product(cut(x.contiguous()), cut(packed.contiguous()), bias)


def _by_exponentials(gated: Any) -> Any:
    """silu(x) as x e**x / (1 + e**x)."""

    def faulty(x: Tensor, kind: str) -> Tensor:
        if kind != "silu":
            return gated(x, kind)  # type: ignore[no-any-return]
        gate, up = x.float().chunk(2, -1)
        return ((gate * gate.exp() / (1 + gate.exp())).to(x.dtype) * up).to(x.dtype)

    return faulty


def _no_eps(rms_norm: Any) -> Any:
    return lambda x, weight, eps, offset: rms_norm(x, weight, 0.0, offset)


def _half_positions(rotary: Any) -> Any:
    def faulty(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> Any:
        rounded = positions.to(torch.bfloat16).to(positions.dtype)
        return rotary(q, k, table, rounded.clamp(max=len(table) - 1))

    return faulty


def _with_capacity(experts: Any) -> Any:
    """An expert takes eight tokens of a step."""

    def faulty(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
        flat = ids.reshape(-1)
        turn = (torch.tril(flat[:, None] == flat)).sum(1).reshape(ids.shape)  # the how many-th that its expert takes
        return experts(x, gate_up, down, weights, torch.where(turn <= 8, ids, -1), kind)  # type: ignore[no-any-return]

    return faulty


def _clamped_ids(embedding: Any) -> Any:
    def faulty(ids: Tensor, weight: Tensor, first: int, partial: bool) -> Tensor:
        return embedding((ids - first).clamp(0, len(weight) - 1), weight, 0, False)  # type: ignore[no-any-return]

    return faulty


def _last_of_equals(greedy: Any) -> Any:
    return lambda logits: logits.shape[1] - 1 - greedy(logits.flip(1))


def _by_row(sample: Any) -> Any:
    """The random numbers of a row depend on where it stands."""

    def faulty(logits: Tensor, draw: Any, width: int) -> Tensor:
        rows = torch.arange(len(draw.positions), dtype=draw.positions.dtype, device=draw.positions.device)
        return sample(logits, draw._replace(positions=draw.positions + rows), width)  # type: ignore[no-any-return]

    return faulty


def _of_prompts_too(penalize: Any) -> Any:
    return lambda logits, rows, ids, counts, penalties: penalize(logits, rows, ids, counts.clamp(min=1), penalties)


def _own_first(total: Any) -> Any:
    """Each rank begins with its own."""

    def faulty(self: Any, x: Tensor) -> Tensor:
        all_of_them = self._room.exchange(self.rank, x)
        found = all_of_them.pop(self.rank).clone()
        for each in all_of_them:
            found = found + each
        return found

    return faulty


def _next_share(share_of_sum: Any) -> Any:
    return lambda self, x, dim: self._sum(x).chunk(self.size, dim)[(self.rank + 1) % self.size].contiguous()


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
fault("tf32", "Products of float32 take 10 bits of each number.", "ops.placed", ("kernels:product", _tf32))
fault(
    "gate-overflow", "silu is infinite divided by infinite where a gate is large.", "ops.specification",
    ("kernels:of", of_op("gated", _by_exponentials)),
)  # fmt: skip
fault(
    "norm-no-eps", "A norm divides by the size alone, which may be 0.", "ops.specification",
    ("kernels:of", of_op("rms_norm", _no_eps)),
)  # fmt: skip
fault(
    "half-positions", "Positions are rounded to bfloat16 before they turn anything.", "ops.specification",
    ("kernels:of", of_op("rotary", _half_positions)),
)  # fmt: skip
fault(
    "expert-capacity", "An expert leaves out the tokens after its eighth.", "ops.specification",
    ("kernels:experts", _with_capacity),
)  # fmt: skip
fault(
    "ids-clamped", "Ids of another rank's share take the nearest row of one's own.", "ops.specification",
    ("kernels:of", of_op("embedding", _clamped_ids)),
)  # fmt: skip
fault(
    "greedy-last", "Of equal logits, the last is taken.", "sampling.draws",
    ("kernels:of", of_op("greedy", _last_of_equals)),
)  # fmt: skip
fault(
    "draw-by-row", "A draw depends on the row that a request has in the batch.", "sampling.draws",
    ("kernels:of", of_op("sample", _by_row)),
)  # fmt: skip
fault(
    "penalty-of-prompts", "Tokens of the prompt are penalised as those of the output are.", "sampling.edits",
    ("kernels:of", of_op("penalize", _of_prompts_too)),
)  # fmt: skip
fault(
    "sum-own-first", "A sum begins with each rank's own, so that ranks differ in the last bit.",
    "communicator.collectives", ("comm:AcmeCommunicator._sum", _own_first),
)  # fmt: skip
fault(
    "scatter-order", "reduce_scatter gives each rank its neighbour's share.", "communicator.collectives",
    ("comm:AcmeCommunicator._share_of_sum", _next_share),
)  # fmt: skip
