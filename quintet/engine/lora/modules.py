"""Modules of an adapter under the names that a model's products have."""

from collections.abc import Collection

from quintet.layers.decoder import ModelBase
from quintet.layers.lora import LoRAMatrices
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
    text_name = text_names(f"{name}.weight" for name in adapter.modules)
    found: dict[str, LoRAMatrices] = {}
    for name, weights in adapter.modules.items():
        known = text_name(f"{name}.weight")
        if known is None:
            raise AdapterError(name, "the adapter changes a part for images or audio, which is not served yet")
        if ".experts." in name:
            raise AdapterError(name, f"the adapter changes experts, and {MERGE}")
        found |= _parts(name, _with_root(known, model), weights, model)
    return found


def _with_root(name: str, model: ModelBase) -> str:
    """Adapters of embedding models are trained on the trunk alone: their names lack the root that a decoder has."""
    return name if model.is_encoder or not name.startswith(_IN_TRUNK) else f"{model.trunk_name.split('.')[0]}.{name}"


def _parts(name: str, known: str, weights: LoRAWeights, model: ModelBase) -> dict[str, LoRAMatrices]:
    """A module, or the parts that the model has of it."""
    bias = None if weights.bias is None else weights.bias.float() * weights.scaling
    whole = LoRAMatrices(
        weights.lora_a, weights.lora_b.float() * weights.scaling, weights.magnitude, bias, weights.embedding
    )
    own = model.canonical(known)
    several = model.unstacked(own, (len(whole.lora_b), weights.lora_a.shape[1]))
    if not several:
        return {own.removesuffix(".weight"): whole}
    if any(len(at) != 1 or not isinstance(at[0], slice) for at in several.values()):
        raise AdapterError(name, f"the adapter changes a stack of experts, and {MERGE}")
    return {part.removesuffix(".weight"): _rows(whole, at[0]) for part, at in several.items()}


def _rows(whole: LoRAMatrices, rows: slice) -> LoRAMatrices:
    """The change of some of a module's outputs."""
    magnitude, bias = (None if each is None else each[rows] for each in (whole.magnitude, whole.bias))
    return whole._replace(lora_b=whole.lora_b[rows], magnitude=magnitude, bias=bias)
