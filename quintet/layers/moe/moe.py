"""The mixture of experts: a router picks k of E gated feed-forwards for each token, and their outputs are weighted."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quintet.interface.weights import PLAIN, CheckpointSlice, Matrix, Weight, WeightFormat, WeightReader
from quintet.layers.build import BuildContext, Layer, Shards, padded_shards, replicated, vector_weight
from quintet.layers.linear import ColumnParallelLinear
from quintet.layers.lora_step import LORA_POOL, LoRAStep
from quintet.layers.mlp import GatedMLP, gate_name
from quintet.layers.moe.expert_placement import RankExperts
from quintet.layers.quantization import QuantizationPlan
from quintet.ops.activation import with_limit
from quintet.ops.moe import ExpertGate

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"  # of each expert, as most checkpoints call them


@dataclass(frozen=True)
class MoESizes:
    """The whole layer's sizes, before it is shared out over ranks."""

    hidden: int
    width: int  # features inside one expert
    experts: int
    top_k: int  # experts of a token (top-k)
    activation: str  # activation
    renormalize: bool  # a token's weights add up to 1 over the experts that it has
    scores: str = "softmax"  # of the router's logits; or "sigmoid", "sqrtsoftplus"
    bias: str | None = None  # the tensor, relative to the layer, that is added to scores for the choice alone
    groups: int = 1  # of neighbouring experts
    top_k_groups: int = 1  # of them, that a token chooses from
    scale: float = 1.0  # of what the experts add up to
    fp32_router: bool = False  # the router multiplies in float32, whatever the model's type is
    margin: float | None = None  # experts are chosen one after the other, each by those so near it: route_sparse()
    shared: int = 0  # features of one more feed-forward, shared_experts, which serves every token; 0: there is none
    limit: float | None = None  # of the gates of the experts that are chosen (see gated()); None: there is none

    def __post_init__(self) -> None:
        if self.experts < 1 or self.width < 1:
            raise ValueError(
                f"a mixture of {self.experts} experts with {self.width} features has nothing in it; correct config.json"
            )


class Experts(Layer):
    """Gated feed-forwards, one per name: [E, 2 I, D] gate over up, and [E, D, I]. Names are relative to the parent.

    Every rank keeps some features of every expert, or, where they are dealt out (Build.dealing), some experts whole;
    what it gives is its share of a sum over the ranks. Where the platform keeps "experts" (Capabilities.weight_formats)
    both stacks may be quantized, each in one format; otherwise they are floats.
    """

    def __init__(
        self, build: BuildContext, sizes: tuple[int, int], kind: str, names: Sequence[str], transposed: bool = False
    ) -> None:
        """sizes: (hidden, features inside one expert). `transposed`: files that hold floats keep them [in, out]."""
        super().__init__(build, "experts")
        self._build, self._names, self._transposed = build, tuple(names), transposed
        (self._hidden, self._width), self.kind = sizes, gate_name(kind)
        self.comm = build.comm
        self.rank_experts: RankExperts | None = None
        self._inner = paired_shards(self._width, build.size)
        if build.expert_placement is not None and build.size > 1 and len(names) > 1:
            self.rank_experts = RankExperts(build.expert_placement, len(names), build.rank, build.size)
            self._inner = replicated(self._width, build.size)
            self.ops.take("local_experts", *["count_experts"] * build.expert_placement.eplb)
        self.places: Tensor
        self.loads: Tensor
        self._held: dict[str, tuple[WeightFormat, WeightReader | None]] = {}  # of each stack, once settled
        self.quantized = False  # both stacks, or none
        self._lora: LoRAStep | None = None  # where there is a pool of adapters beside both products
        self.gate_up: Tensor
        self.down: Tensor

    takes_lora: ClassVar[bool] = True  # adapters may change them

    def finalize(self, path: str) -> None:
        """The formats of both stacks, and the provider for them."""
        size, stacks = self._build.size, [each for each in self.weights(path) if each.use.endswith("experts")]
        found = {each.name: self._settled(path, each) for each in stacks}
        readers = [reader for _, reader in found.values() if reader is not None]
        if readers and self._inner.ranges[-1][1] > self._width:
            raise ValueError(
                f"{size} ranks do not divide the {self._width} features of these quantized experts evenly; "
                "choose another tensor_parallel_size"
            )
        self.quantized = not any(fmt.plain or fmt.act_order for fmt, _ in found.values())
        self._held = {name: (fmt if self.quantized else PLAIN, reader) for name, (fmt, reader) in found.items()}
        if self.quantized:
            self.ops.take("quantized_experts")

    def _settled(self, path: str, weight: Weight) -> tuple[WeightFormat, WeightReader | None]:
        """Plain where the platform keeps no quantized experts."""
        forms = self._build.quantization
        modules = [(part.source.removesuffix(".weight"), weight.shard(part)) for part in weight.slices]
        kept = forms.supported_kinds is not None and "experts" in forms.supported_kinds and not weight.padded
        held = {forms.format_for(module, cut) if kept else (PLAIN, forms.reader(module)) for module, cut in modules}
        if len(held) > 1:
            raise ValueError(
                f"the experts' {weight.name} of {path} are held in {len(held)} ways, and are one stack here; use a "
                "checkpoint that holds gate and up of all experts alike"
            )
        ((fmt, reader),) = held
        return fmt, forms.reader(modules[0][0]) if fmt.plain else reader

    def weights(self, path: str) -> list[Weight]:
        parent = path[: path.rfind(".") + 1]
        turned = self._transposed and self._build.quantization.reader(f"{parent}{self._names[0]}.{GATE}") is None

        def part(expert: str, projection: str, shape: tuple[int, int]) -> CheckpointSlice:
            return CheckpointSlice(
                f"{parent}{expert}.{projection}.weight", shape, self._inner.ranges, transposed=turned
            )

        first, second = (self._width, self._hidden), (self._hidden, self._width)
        return [
            self._stacked_weight("gate_up", lambda expert: [part(expert, each, first) for each in (GATE, UP)], 0),
            self._stacked_weight("down", lambda expert: [part(expert, DOWN, second)], 1),
        ]

    def _stacked_weight(
        self, name: str, parts: Callable[[str], Sequence[CheckpointSlice]], axis: int, use: str = "experts"
    ) -> Weight:
        """A matrix of each expert that is here; `parts` of one."""
        names, build = self._names, self._build
        own, others = (
            (range(len(names)), [])
            if self.rank_experts is None
            else (self.rank_experts.local_experts, self.rank_experts.remote_experts)
        )
        here, remote = (tuple(part for each in some for part in parts(names[each])) for some in (own, others))
        fmt, reader = self._format_of(name)
        return Weight(name, here, axis, build.rank, build.dtype, use, fmt, reader, stack=len(own), remote_slices=remote)

    def constants(self) -> Mapping[str, Tensor]:
        return {} if self.rank_experts is None else self.rank_experts.constants()

    def _here(self, x: Tensor, ids: Tensor) -> Tensor:
        """Places in this rank's stacks; -1 for experts of others."""
        if self.rank_experts is None:
            return ids
        if self.rank_experts.eplb:
            self.ops.count_experts(ids, self.loads)
        found: Tensor = self.ops.local_experts(x, ids, self.places)
        return found

    def _format_of(self, name: str) -> tuple[WeightFormat, WeightReader | None]:
        """Returns the format and reader of a stack; plain until it is settled."""
        return self._held.get(name, (PLAIN, None))

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, D], weights [T, k] float32 and ids [T, k] int32 of its experts -> [T, D], this rank's share."""
        ids = self._here(x, ids)
        if self._lora is not None and self._lora.slots is not None:
            adapted: Tensor = self._modules[LORA_POOL](x, self, weights, ids)  # type: ignore[misc]
            return adapted
        return self._share(x, weights, ids)

    def _share(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """forward() without adapters, by the experts' places here."""
        if self.quantized:
            held: Tensor = self.ops.quantized_experts(x, *self.stacks, weights, ids, self.kind)
            return held
        share: Tensor = self.ops.experts(x, self.gate_up, self.down, weights, ids, self.kind)
        return share

    def add_lora_pool(self, pool: nn.Module) -> None:
        """Has a pool of adapters compute the steps that have adapters: a module with forward(x, self, weights, ids)."""
        self._lora = self._build.lora
        self.add_module(LORA_POOL, pool)

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs of an expert, and features inside it, of all ranks."""
        return self._hidden, self._width

    @property
    def is_mixture(self) -> bool:
        """True if tokens choose among several."""
        return len(self._names) > 1

    @property
    def moves_experts(self) -> bool:
        """True if experts may go to other ranks while the model runs."""
        return self.rank_experts is not None and self.rank_experts.eplb

    @property
    def stacks(self) -> tuple[Matrix, Matrix]:
        """Both stacks, as this rank has them."""
        return self._stack("gate_up"), self._stack("down")

    @property
    def gate(self) -> ExpertGate:
        """Computation between both products."""
        return ExpertGate(self.kind)

    def _stack(self, name: str) -> Matrix:
        """Quantized, or plain."""
        held: Mapping[str, Any] = self._parameters
        scales, zeros, mins = (held.get(f"{name}_{each}") for each in ("scales", "zeros", "mins"))
        return Matrix(held[name], scales, zeros, format=self._held[name][0], mins=mins)


class MoE(Layer):
    """x [T, D] -> [T, D]. Every rank routes alike: the router is whole on each, and exact."""

    records_experts: ClassVar[bool] = True  # False: a platform's subclass that chooses experts within a kernel

    def __init__(self, build: BuildContext, moe_sizes: MoESizes, choice: "ExpertRouter | None" = None) -> None:
        super().__init__(build)
        self._comm, self._moe_sizes = build.comm, moe_sizes
        self.gate = router(build, moe_sizes.hidden, "gate", moe_sizes.experts, fp32=moe_sizes.fp32_router)
        self.choice = choice or self.expert_router(build, moe_sizes)
        self.shared_experts: nn.Module | None = None
        if moe_sizes.shared:
            self.shared_experts = GatedMLP(build, moe_sizes.hidden, moe_sizes.shared, moe_sizes.activation)
        self._added = build.ops.take(*["add"] * bool(moe_sizes.shared))
        names = [f"experts.{expert}" for expert in range(moe_sizes.experts)]
        kind = with_limit(moe_sizes.activation, moe_sizes.limit)
        self.experts = Experts(build, (moe_sizes.hidden, moe_sizes.width), kind, names)

    def expert_router(self, build: BuildContext, moe_sizes: MoESizes) -> "ExpertRouter":
        """Returns what chooses experts by the router's logits."""
        return ExpertRouter(build, moe_sizes)

    def forward(self, x: Tensor) -> Tensor:
        out = self._comm.all_reduce(self.share(x))
        return out if self.shared_experts is None else self._added.add(out, self.shared_experts(x))

    def share(self, x: Tensor) -> Tensor:
        """Returns this rank's share of the sum over the ranks."""
        weights, ids = self.choice(self.gate(x))
        share: Tensor = self.experts(x, weights, ids)
        return share


class ExpertRouter(Layer):
    """The router's logits [T, E] -> weights [T, k] float32 and ids [T, k] int32 of each token's experts."""

    records_experts: ClassVar[bool] = True  # see MoE

    def __init__(self, build: BuildContext, moe_sizes: MoESizes) -> None:
        self._build, self._moe_sizes, self._routed = build, moe_sizes, build.routed_experts
        if self._routed is not None:
            self._routed.add_router(moe_sizes.experts, moe_sizes.top_k)
        plain = moe_sizes.bias is None and moe_sizes.groups == 1
        self._op = "route_grouped" if moe_sizes.scores == "sigmoid" else "route" if plain else "route_limited"
        self._op = self._op if moe_sizes.margin is None else "route_sparse"
        self._op = "route_softplus" if moe_sizes.scores == "sqrtsoftplus" else self._op
        super().__init__(build, self._op, *["scale"] * (moe_sizes.scale != 1))
        self.bias: Tensor
        self.unbiased: Tensor

    def weights(self, path: str) -> list[Weight]:
        name, size = self._moe_sizes.bias, self._moe_sizes.experts
        if name is None:
            return []
        source = f"{path.rpartition('.')[0]}.{name}"
        return [vector_weight(self._build, source, size, torch.float32, name="bias")]

    def constants(self) -> Mapping[str, Tensor]:
        lacking = self._moe_sizes.bias is None and self._op in ("route_grouped", "route_limited")
        return {"unbiased": torch.zeros(self._moe_sizes.experts)} if lacking else {}

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.choose(logits)
        self.record(ids)
        return weights, ids

    def record(self, ids: Tensor) -> None:
        """Keeps the ids [T, k] for the step's outputs, if they are asked for."""
        if self._routed is not None:
            self._routed.record(ids)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The same as forward(), but for record()."""
        of, choose = self._moe_sizes, getattr(self.ops, self._op)
        if self._op == "route":
            weights, ids = choose(logits, of.top_k, of.renormalize)
        elif of.margin is not None:
            weights, ids = choose(logits, of.top_k, of.margin)
        elif self._op == "route_softplus":
            weights, ids = choose(logits, self.bias, of.top_k)
        else:
            bias = self.unbiased if of.bias is None else self.bias
            weights, ids = choose(logits, bias, of.top_k, of.groups, of.top_k_groups, of.renormalize)
        return (weights if of.scale == 1 else self.ops.scale(weights, of.scale)), ids


class SharedMoE(MoE):
    """With one more expert, of another width, that serves every token by the sigmoid of a logit of its own.

    A mixture of one: route_grouped() weighs by the sigmoid, and the rounding is that of all experts.
    """

    def __init__(self, build: BuildContext, moe_sizes: MoESizes, width: int) -> None:
        super().__init__(build, moe_sizes)
        self._own = build.ops.take("route_grouped", "add")
        self.shared_gate = router(build, moe_sizes.hidden, "shared_expert_gate", 1)
        self.shared = Experts(build, (moe_sizes.hidden, width), moe_sizes.activation, ["shared_expert"])
        self.unbiased: Tensor

    def constants(self) -> Mapping[str, Tensor]:
        return {"unbiased": torch.zeros(1)}

    def share(self, x: Tensor) -> Tensor:
        weights, ids = self._own.route_grouped(self.shared_gate(x), self.unbiased, 1, 1, 1, False)
        both: Tensor = self._own.add(super().share(x), self.shared(x, weights, ids))
        return both


def router(
    build: BuildContext, hidden: int, name: str, outputs: int, bias: bool = False, fp32: bool = False
) -> nn.Module:
    """x [T, hidden] -> logits [T, outputs] on every rank; in floats: a wrong logit chooses a wrong expert. With `wide`
    in float32, as the checkpoint has the weight."""
    build = replace(build, quantization=QuantizationPlan(), dtype=torch.float32 if fp32 else build.dtype)
    kind = Float32Linear if fp32 else ColumnParallelLinear
    return kind(build, replicated(hidden, build.size), {name: replicated(outputs, build.size)}, bias)


class Float32Linear(ColumnParallelLinear):
    """A product in float32 of what has fewer bits."""

    def __init__(self, build: BuildContext, *args: Any, **settings: Any) -> None:
        super().__init__(build, *args, **settings)
        self._wide = build.ops.take("widen")

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out] float32
        return super().forward(self._wide.widen(x, x.shape[0], False))


def paired_shards(width: int, size: int) -> Shards:
    """Equal shares of whole pairs of features, zeros past the end: half precision is packed in pairs of inputs."""
    return Shards(width, padded_shards(-(-width // 2), size).times(2).ranges)


def slices_of(stack: Weight) -> tuple[CheckpointSlice, ...]:
    """Returns the slices of all experts of a stack, those of other ranks last."""
    return (*stack.slices, *stack.remote_slices)


def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
    """Names of the experts' own tensors in a stack that transformers 5 may store, and where each lies in it.

    [E, 2 I, D] experts.gate_up_proj (gate over up), or up_proj alone, [E, D, I] experts.down_proj; with another end
    their scales, of blocks in the same order. Nothing for other tensors; ValueError for scales that are cut by where
    gate ends.
    """
    found = _STACK.fullmatch(name)
    if found is None or (own := TENSOR_NAMES.get(found[3])) is None:
        return {}
    dims = (1, 2, 3) if found[3] else (3,)
    if len(shape) not in dims or 0 in shape or shape[0] > MAX_EXPERTS:
        return {}
    parent, rows = found[1], shape[1] if len(shape) > 1 else 1
    if found[2] in (UP, DOWN):
        return {f"{parent}.{expert}.{found[2]}.{own}": (expert,) for expert in range(shape[0])}
    if rows % 2 and (rows > 1 or not found[3]):
        raise ValueError(f"{name} has {rows} rows, which are not gate's and up's, half of them each")
    cuts = [(slice(0, rows // 2),), (slice(rows // 2, rows),)] if rows > 1 else [(slice(0, 1),)] * 2
    return {
        f"{parent}.{expert}.{projection}.{own}": (expert, *cut) if len(shape) > 1 else (expert,)
        for expert in range(shape[0])
        for projection, cut in zip((GATE, UP), cuts, strict=True)
    }


MAX_EXPERTS = 2**16  # experts of a layer, far beyond any model
_STACK = re.compile(rf"(.+\.experts)\.(gate_up_proj|{UP}|{DOWN})(|_[a-z_]+)")
TENSOR_NAMES = {
    "": "weight",
    "_scale_inv": "weight_scale_inv",
    "_scale": "weight_scale",
    "_activation_scale": "activation_scale",
    "_input_scale": "input_scale",
}  # what of an expert's a stack's tensor is, by its end
