"""Modules of an adapter under the names that a model's products have."""

from collections.abc import Collection

from quintet.layers.decoder import ModelBase
from quintet.layers.lora import LoRAMatrices
from quintet.layers.moe.moe import Experts, unstacked
from quintet.lora import stacks
from quintet.lora.adapter import AdapterError, LoRAAdapter, LoRAWeights
from quintet.model_loader.text_names import text_names

MERGE = "that is not served beside other requests; write it into the model with `quintet merge-lora`, and serve that"
_IN_TRUNK = ("layers.", "decoder.layers.", "h.", "blocks.")  # beginnings of names within a decoder's trunk


def matrices_of(adapter: LoRAAdapter, model: ModelBase, in_heads: Collection[str] = ()) -> dict[str, LoRAMatrices]:
    """Returns an adapter's matrices by the model's names of modules. `in_heads`: whole tensors that its pooling heads
    are made of. AdapterError names what cannot be served."""
    saved = sorted(set(adapter.saved) - adapter.base_copies - set(in_heads))
    if saved:
        raise AdapterError(saved[0], f"the adapter holds it whole (modules_to_save, or bias), and {MERGE}")
    stored = {name: name if each.is_stack else f"{name}.weight" for name, each in adapter.modules.items()}
    text_name, sizes = text_names(stored.values()), _sizes_of_experts(model)
    found: dict[str, LoRAMatrices] = {}
    for name, weights in adapter.modules.items():
        known = text_name(stored[name])
        if known is None:
            raise AdapterError(name, "the adapter changes a part for images or audio, which is not served yet")
        own = model.canonical(_with_root(known, model))
        if weights.is_stack:
            turned = stacks.is_transposed(name, adapter.modules, sizes)
            found |= _experts(name, own, stacks.transposed(weights) if turned else weights, model)
        else:
            found |= _parts(name, own, _matrices(weights), model)
    return found


def _sizes_of_experts(model: ModelBase) -> tuple[int, int]:
    """Inputs of an expert, and features inside it; zeros where none is here."""
    return next((each.sizes for each in model.modules() if isinstance(each, Experts) and each.is_mixture), (0, 0))


def _with_root(name: str, model: ModelBase) -> str:
    """Adapters of embedding models are trained on the trunk alone: their names lack the root that a decoder has."""
    return name if model.is_encoder or not name.startswith(_IN_TRUNK) else f"{model.trunk_name.split('.')[0]}.{name}"


def _matrices(weights: LoRAWeights) -> LoRAMatrices:
    bias = None if weights.bias is None else weights.bias.float() * weights.scaling
    scaled = weights.lora_b.float() * weights.scaling
    return LoRAMatrices(weights.lora_a, scaled, weights.magnitude, bias, weights.embedding)


def _parts(name: str, own: str, whole: LoRAMatrices, model: ModelBase) -> dict[str, LoRAMatrices]:
    """A module, or the parts that the model has of it."""
    several = model.unstacked(own, (len(whole.lora_b), whole.lora_a.shape[1]))
    if not several:
        return {own.removesuffix(".weight"): whole}
    if any(len(at) != 1 or not isinstance(at[0], slice) for at in several.values()):
        raise AdapterError(name, f"the adapter changes a stack of experts as one matrix, and {MERGE}")
    return {part.removesuffix(".weight"): _rows(whole, at[0]) for part, at in several.items()}


def _experts(name: str, own: str, weights: LoRAWeights, model: ModelBase) -> dict[str, LoRAMatrices]:
    """The modules of all experts."""
    count, outputs, inputs = len(weights.lora_a), *stacks.shape_of(weights)
    shape = (count, outputs, inputs)
    several = [part.removesuffix(".weight") for part in model.unstacked(own, shape) or unstacked(own, shape)]
    if not several or len(several) % count:
        raise AdapterError(name, "the adapter changes a parameter that is no stack of this model's experts")
    parts = stacks.experts_of(weights, len(several) // count)
    return {part: _matrices(each) for part, each in zip(several, parts, strict=True)}


def _rows(whole: LoRAMatrices, rows: slice) -> LoRAMatrices:
    """The change of some of a module's outputs."""
    magnitude, bias = (None if each is None else each[rows] for each in (whole.magnitude, whole.bias))
    return whole._replace(lora_b=whole.lora_b[rows], magnitude=magnitude, bias=bias)
