"""A causal model of transformers as one of our families: its modules, with ours in their places where they are alike."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quintet.layers.build import Build, whole
from quintet.layers.decoder import Family
from quintet.layers.forms import Forms
from quintet.layers.linear import Linear, Stored
from quintet.layers.mixing import Cache
from quintet.models.backend.construct import NAME, Unserved, constructed
from quintet.models.backend.layers import Attended, Head, Loose, Norm, Product, Rest, Running, Table
from quintet.models.backend.names import Names
from quintet.models.backend.plan import Plan
from quintet.models.backend.trace import Call, Trace, alike, traced
from quintet.platforms.interface import State
from quintet.types import AttentionSpec, Batch, Outputs

ROUTERS = re.compile(r"(.*\.)?(gate|router|router\.\w+|shared_expert_gate)")  # products that choose experts: exact


class Model(Family):
    """What the engine runs is transformers' forward(): one flat row of tokens, no mask, no cache of its own."""

    recordable = False  # torch's own functions compute a part of it

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        if build.wanted.taps:
            raise Unserved(config, "outputs of single layers are not given")
        theirs = constructed(config, build.dtype, build.max_model_len)
        trace, self._names = traced(theirs), Names(theirs)
        self._running, self._wanted, self._ops = Running(), build.wanted, build.ops.take("take_rows")
        self._plan = Plan(theirs, build)
        self._give_attention(build, trace)
        self.vocab_size = int(theirs.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
        self.ignored = _ignored(theirs)  # type: ignore[misc]
        loose = _Replacing(theirs, build, trace, self._plan, self._running).replace()
        theirs.set_attn_implementation(NAME)  # type: ignore[operator]
        for name, module in theirs.named_children():
            self.add_module(name, module)
        self.beside = Rest(build, loose)
        self.__dict__["_theirs"] = theirs  # no module of ours: its parts are, under the names that checkpoints have

    def _give_attention(self, build: Build, trace: Trace) -> None:
        for call in trace.calls:
            held = call.module.__dict__.setdefault("attended", Attended(self._running))
            spec = self._plan.shared(_spec(call, build))
            held.add(build.mixing(spec), spec.head_dim, call.value_dim)

    def forward(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        """One step, as of other families."""
        cache, running = Cache(state, batch), self._running
        running.begin(cache)
        try:
            ids, positions = batch.token_ids.long()[None], batch.positions.long()[None]
            logits = self._theirs(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
            if logits.shape[0] != batch.rows.shape[0] or running.hidden is None:
                logits = self._ops.take_rows(logits, batch.rows)
            return Outputs(logits, running.hidden if self._wanted.hidden else None), cache.state
        finally:
            running.end()

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._names.gathered(entries)


def _spec(call: Call, build: Build) -> AttentionSpec:
    return AttentionSpec(
        heads=call.heads,
        kv_heads=call.kv_heads,
        head_dim=max(call.head_dim, call.value_dim),
        scale=call.scale,
        dtype=build.dtype,
        page_size=build.page_size,
        window=call.seen.window,
        softcap=call.softcap,
        sinks=call.sinks,
        kv_dtype=build.kv_dtype,
    )


def _ignored(theirs: Any) -> tuple[str, ...]:
    """What checkpoints may hold that the model does not keep."""
    said = [f".*(?:{each}).*" for each in getattr(theirs, "_keys_to_ignore_on_load_unexpected", None) or ()]
    tied = [re.escape(name) for name in getattr(theirs, "all_tied_weights_keys", None) or ()]
    return (r".*rotary_emb\.inv_freq", *said, *tied)


class _Replacing:
    """Puts our layers in the places of modules that are plainly what they are."""

    def __init__(self, theirs: Any, build: Build, trace: Trace, plan: Plan, running: Running) -> None:
        self._theirs, self._build, self._trace, self._plan, self._running = theirs, build, trace, plan, running
        self._tokens, self._head = theirs.get_input_embeddings(), theirs.get_output_embeddings()
        self._tied = self._head.weight is self._tokens.weight
        self._fp32 = [key for key, dtype in theirs._get_dtype_plan(build.dtype).items() if dtype == torch.float32]

    def replace(self) -> dict[str, Loose]:
        """-> what is left."""
        paths = {module: path for path, module in self._theirs.named_modules()}
        for module, path in paths.items():
            made = self._made(module, path)
            if made is not None:
                parent, _, name = path.rpartition(".")
                setattr(self._theirs.get_submodule(parent), name, made)
        self._plan.check()
        return self._loose()

    def _made(self, module: nn.Module, path: str) -> nn.Module | None:
        if self._in_float32(path):
            return None
        if module is self._head:
            return self._made_head(path)
        if module is self._tokens:
            return self._made_table(module)
        if type(module) is nn.Linear and self._is_product(module):
            return self._plan.product(path, self._exact(path), (module.in_features, module.out_features), module.bias is not None)
        if type(module).__name__ == "Conv1D" and self._is_product(module, transposed=True):
            return self._turned(module, path)
        return self._made_norm(module)

    def _made_head(self, path: str) -> nn.Module | None:
        head = self._head
        if type(head) is not nn.Linear or (self._tied and (head.bias is not None or self._made_table(self._tokens) is None)):
            return None
        source = self._path(self._tokens) if self._tied else path
        shape = head.in_features, head.out_features
        return Head(self._build, shape, f"/{source}", head.bias is not None, self._running)

    def _path(self, module: nn.Module) -> str:
        return next(path for path, each in self._theirs.named_modules() if each is module)

    def _made_table(self, module: nn.Module) -> Table | None:
        scale = _scale(module)
        if scale is None:
            return None
        count, width = module.weight.shape  # type: ignore[misc]
        return Table(self._build, int(count), int(width), scale, self._running)

    def _made_norm(self, module: nn.Module) -> nn.Module | None:
        eps = next((e for n in ("variance_epsilon", "eps", "epsilon") if isinstance(e := getattr(module, n, None), float)), None)
        held = dict(module.named_parameters())
        if eps is None or list(held) != ["weight"] or held["weight"].dim() != 1 or type(module) is nn.LayerNorm:
            return None
        from quintet.ops.norm import rms_norm

        width = held["weight"].shape[0]
        for offset in (0.0, 1.0):
            if alike(module, lambda x, weight, offset=offset: rms_norm(x, weight, eps, offset), width):  # type: ignore[misc]
                return Norm(self._build, width, eps, offset)
        return None

    def _is_product(self, module: nn.Module, transposed: bool = False) -> bool:
        """Whether nothing but its own product takes the weight."""
        weight: Any = module.weight
        own = transposed or self._trace.products[id(weight)] > 0
        floats = weight.dtype == self._build.dtype
        return own and floats and (transposed or id(weight) not in self._trace.touched)

    def _exact(self, path: str) -> Build:
        return replace(self._build, forms=Forms()) if ROUTERS.fullmatch(path) else self._build

    def _turned(self, module: Any, path: str) -> Linear | None:
        inputs, outputs = module.weight.shape
        if self._build.size > 1:
            return None
        name = path.rpartition(".")[2]
        split = whole(outputs, 1)
        return Product(self._build, whole(inputs, 1), {name: split}, True, Stored(transposed=True))

    def _in_float32(self, path: str) -> bool:
        return any(re.search(rf"(^|\.){re.escape(key)}($|\.)", path) for key in self._fp32)

    def _loose(self) -> dict[str, Loose]:
        found: dict[int, tuple[str, list[tuple[nn.Module, str]], Tensor, bool]] = {}
        from quintet.layers.build import Layer

        for path, module in self._theirs.named_modules():
            if isinstance(module, Layer):
                continue
            unsaved = module._non_persistent_buffers_set
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    stored = name not in unsaved
                    whole_name = f"{path}.{name}" if path else name
                    found.setdefault(id(tensor), (whole_name, [], tensor, stored))[1].append((module, name))
        return {
            name: Loose(tuple(owners), tensor, stored, torch.float32 if self._in_float32(name) else tensor.dtype)
            for name, owners, tensor, stored in found.values()
        }


def _scale(module: nn.Module) -> float | None:
    """What a table's rows are multiplied by; None where it does something else."""
    if type(module) is nn.Embedding:
        return 1.0
    scale = getattr(module, "embed_scale", None)
    if not isinstance(module, nn.Embedding) or not isinstance(scale, (Tensor, float, int)):
        return None
    return float(scale)
