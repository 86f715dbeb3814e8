"""The tensors of a base checkpoint that an adapter changes, found and checked before any is written."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quintet.lora import stacks
from quintet.lora.adapter import AdapterError, LoRAAdapter, LoRAWeights
from quintet.lora.merge import merged_bias, merged_stack, merged_weight
from quintet.lora.peft_config import PeftLoraConfig

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "shared")
HEADS = ("lm_head", "embed_out")
# Models whose weights are [inputs, outputs] in transformers' Conv1D, and the modules that are such.
CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
CONV1D_MODULES = ("c_attn", "c_proj", "c_fc", "q_attn")
# an expert's matrices that a stack of transformers 5 holds, as files of transformers 4 call them
MATRICES = {stacks.GATE_UP: ("gate_proj", "up_proj"), stacks.DOWN: ("down_proj",)}
MIXTRAL_MATRICES = {stacks.GATE_UP: ("w1", "w3"), stacks.DOWN: ("w2",)}
_SHOWN = 8  # names that an error lists
# transformers 5 gives parts of a wrapped model names within `model`; checkpoints keep those of older versions.
_RENAMED = (
    (re.compile(r"^model\.language_model\."), ("language_model.model.", "model.", "language_model.")),
    (re.compile(r"^model\.(?=visual\.|vision_|multi_modal_|audio_|image_|embed_vision)"), ("",)),
    (re.compile(r"^lm_head\."), ("language_model.lm_head.",)),
)


@dataclass(frozen=True)
class BaseTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: a type that torch has not


@dataclass
class Change:
    """New content of a tensor: a whole one, then LoRA's on top."""

    saved: Tensor | None = None
    weight: LoRAWeights | None = None
    bias: LoRAWeights | None = None
    transposed: bool = False


@dataclass(frozen=True)
class TiedPair:
    """Names of token embedding and head that are one weight in the base."""

    embedding: str
    head: str
    stored: bool  # the base's files hold the head too
    follows: bool  # the head stays the embedding

    def __contains__(self, name: object) -> bool:
        return name in (self.embedding, self.head)


@dataclass
class MergePlan:
    """Changes by the names of the base's tensors."""

    num_tensors: int
    changes: dict[str, Change] = field(default_factory=dict)
    tied: TiedPair | None = None  # where one of the two changes
    rows: dict[int, int] = field(default_factory=dict)  # vocabulary size -> the new one

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the tensor with its change, in its dtype; itself where it has none."""
        change = self.changes.get(name)
        if change is None:
            return tensor
        start = tensor if change.saved is None else change.saved
        if change.weight is not None:
            merge = merged_stack if change.weight.is_stack else merged_weight
            return merge(start, change.weight, change.transposed, tensor.dtype)
        start = start.to(tensor.dtype)
        return start if change.bias is None else merged_bias(start, change.bias)


def plan_merge(
    place: Path, adapter: tuple[LoRAAdapter, PeftLoraConfig], tensors: Mapping[str, BaseTensor], facts: tuple[str, bool]
) -> MergePlan:
    """`facts`: the base's model type, and whether its configuration ties the head to the token embedding.

    AdapterError names modules and tensors of the adapter that no tensor of the base takes, or that do not fit it.
    """
    return _Planner(place, *adapter, tensors, *facts).plan()


@dataclass
class _Planner:
    place: Path
    adapter: LoRAAdapter
    settings: PeftLoraConfig
    tensors: Mapping[str, BaseTensor]
    model_type: str
    tied: bool

    def plan(self) -> MergePlan:
        plan = MergePlan(len(self.tensors))
        missing: list[str] = []
        for name, saved in self.adapter.saved.items():
            self._change(plan, name, missing).saved = saved
        for path, weights in self.adapter.modules.items():
            if weights.is_stack:
                self._change_experts(plan, path, weights, missing)
                continue
            self._change(plan, f"{path}.weight", missing).weight = weights
            if weights.bias is not None:
                self._change(plan, f"{path}.bias", missing).bias = weights
        if missing:
            raise AdapterError(self.place, self._without(missing))
        head = next((name for name in plan.changes if name not in self.tensors), None)
        if self.tied:
            plan.tied = self._tied_pair(plan, head)
        for name, change in plan.changes.items():
            at = plan.tied.embedding if plan.tied is not None and name not in self.tensors else name
            self._check(plan, name, change, self.tensors[at])
        if plan.tied is not None and plan.rows and plan.tied.head not in plan.changes:
            plan.tied = TiedPair(plan.tied.embedding, plan.tied.head, plan.tied.stored, follows=True)
        return plan

    def _change_experts(self, plan: MergePlan, path: str, weights: LoRAWeights, missing: list[str]) -> None:
        """Changes a stack of the base, or the matrices of each of its experts."""
        if any(each in self.tensors for each in self._candidates(path)):
            self._change(plan, path, missing).weight = weights
            return
        parent, _, last = path.rpartition(".")
        for holder, names in (
            (parent, MATRICES.get(last, (last,))),
            (parent.replace(".mlp.", ".block_sparse_moe."), MIXTRAL_MATRICES.get(last, (last,))),
        ):
            first = next(
                (each for each in self._candidates(f"{holder}.0.{names[0]}.weight") if each in self.tensors), ""
            )
            if first:
                break
        else:
            missing.append(path)
            return
        outputs, inputs = self.tensors[first].shape
        sizes = (outputs, inputs) if last == stacks.DOWN else (inputs, outputs)
        if stacks.is_transposed(path, self.adapter.modules, sizes):
            weights = stacks.transposed(weights)
        for number, own in enumerate(stacks.experts_of(weights, len(names))):
            expert, part = divmod(number, len(names))
            self._change(plan, f"{holder}.{expert}.{names[part]}.weight", missing).weight = own

    def _change(self, plan: MergePlan, name: str, missing: list[str]) -> Change:
        found = next((each for each in self._candidates(name) if each in self.tensors), None)
        if found is None and self.tied and _is_head(name):
            found = name  # the head that is the token embedding
        if found is None:
            missing.append(name)
        return plan.changes.setdefault(found or name, Change())

    def _candidates(self, name: str) -> Iterator[str]:
        """Names that the tensor may have in the base's files."""
        yield name
        for pattern, replacements in _RENAMED:
            if match := pattern.match(name):
                yield from (each + name[match.end() :] for each in replacements)
        roots = {each.split(".", 1)[0] for each in self.tensors}
        root, _, rest = name.partition(".")
        if root not in roots:  # a trunk that was saved or trained by itself
            yield rest
            yield from (f"{each}.{name}" for each in sorted(roots) if each in ("model", "transformer"))

    def _without(self, missing: list[str]) -> str:
        names = ", ".join(map(repr, missing[:_SHOWN]))
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        first = missing[0]
        fused = [each for each, tensor in self.tensors.items() if "experts" in each and len(tensor.shape) == 3]
        if ".experts." in first and fused:
            return (
                f"it changes {names}{more}, and the base holds its experts fused ({fused[0]}), which is not supported; "
                "merge the adapter with PEFT"
            )
        parent = first.rsplit(".", 2)[0]
        near = [each for each in self.tensors if each.startswith(f"{parent}.")][:_SHOWN]
        beside = f"; beside {first!r} it has {', '.join(near)}" if near else ""
        return (
            f"the base has no tensor for {names}{more}{beside}. Give the model that the adapter was trained on"
            + (f" ({self.adapter.base_model!r})" if self.adapter.base_model else "")
            + "; for a head that it lacks, that model with the head, saved by transformers"
        )

    def _tied_pair(self, plan: MergePlan, head: str | None) -> TiedPair | None:
        tables = [
            name for name, tensor in self.tensors.items()
            if name.endswith(".weight") and name.split(".")[-2:-1] and name.split(".")[-2] in EMBEDDINGS
            and len(tensor.shape) == 2
        ]  # fmt: skip
        stored = next((name for name in self.tensors if _is_head(name)), None)
        changed = [name for name in (*tables, stored, head) if name in plan.changes]
        if not changed:
            return None
        if len(tables) != 1:
            raise AdapterError(
                self.place, f"it changes {changed[0]!r}, and the base has {len(tables)} tables that may be the head's "
                "weight too; save the base model with tie_word_embeddings=False, head included",
            )  # fmt: skip
        name = stored or head or ("embed_out.weight" if self.model_type == "gpt_neox" else "lm_head.weight")
        if stored is None and head is None and tables[0].startswith("language_model."):
            name = f"language_model.{name}"
        return TiedPair(tables[0], name, stored is not None, self.settings.ensure_weight_tying)

    def _check(self, plan: MergePlan, name: str, change: Change, base: BaseTensor) -> None:
        if base.dtype not in FLOATS:
            raise AdapterError(
                self.place, f"it changes {name!r}, which the base holds as {base.dtype}; give the base model in floats"
            )
        shape = base.shape
        if change.saved is not None and tuple(change.saved.shape) != shape:
            shape = self._resized(plan, name, tuple(change.saved.shape), shape)
        for weights, what in ((change.weight, "weight"), (change.bias, "bias")):
            if weights is not None:
                wanted = _shape_of(weights, what)
                is_turned = self._stack_is_transposed if weights.is_stack else self._is_transposed
                change.transposed = what == "weight" and is_turned(name, shape, wanted)
                wanted = wanted[::-1] if change.transposed else wanted
                wanted = (len(weights.lora_a), *wanted) if weights.is_stack else wanted
                if wanted != shape:
                    raise AdapterError(
                        self.place, f"its change of {name!r} has the shape {list(wanted)}, and the base's tensor "
                        f"{list(shape)}; give the model that the adapter was trained on",
                    )  # fmt: skip

    def _resized(self, plan: MergePlan, name: str, new: tuple[int, ...], old: tuple[int, ...]) -> tuple[int, ...]:
        """A table or head of another vocabulary."""
        table = name.split(".")[-2:-1]
        if not table or table[0] not in (*EMBEDDINGS, *HEADS) or new[1:] != old[1:]:
            raise AdapterError(
                self.place, f"its tensor {name!r} has the shape {list(new)}, and the base's {list(old)}; give the "
                "model that the adapter was trained on",
            )  # fmt: skip
        if plan.rows.setdefault(old[0], new[0]) != new[0]:
            raise AdapterError(
                self.place, f"its token embedding and head have {plan.rows[old[0]]} and {new[0]} rows; save it again"
            )
        return new

    def _is_transposed(self, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """A weight [inputs, outputs]. Of a square one only the model's type tells."""
        if len(shape) != 2 or shape != wanted[::-1]:
            return False
        conv1d = self.model_type in CONV1D_MODELS and name.split(".")[-2] in CONV1D_MODULES
        return conv1d or (shape[0] != shape[1] and self.settings.fan_in_fan_out)

    def _stack_is_transposed(self, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """True if a stack is [E, inputs, outputs]. Of square matrices, the stack beside this one tells;
        where none does, a warning names what is assumed."""
        if len(shape) == 3 and shape[1] == shape[2]:
            other = stacks.with_sibling(name)[1]
            if other in self.tensors and other in self.adapter.modules:
                shape, wanted = self.tensors[other].shape, stacks.shape_of(self.adapter.modules[other])
            if shape[1] == shape[2]:
                stacks.warn_of_square(name, self.adapter.modules, "B and A are in the order of the base's dimensions")
        return shape[1:] == wanted[::-1] != wanted


def _is_head(name: str) -> bool:
    return name.split(".")[-2:] in [[head, "weight"] for head in HEADS]


def _shape_of(weights: LoRAWeights, what: str) -> tuple[int, ...]:
    """Shape of the change: [N, K] of a linear layer's weight, [V, H] of an embedding's, [N] of a bias."""
    outputs, inputs = stacks.shape_of(weights)
    if what == "bias":
        return (outputs,)
    return (inputs, outputs) if weights.embedding else (outputs, inputs)
