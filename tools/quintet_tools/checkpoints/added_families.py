"""Small models of families that installed packages and programs add, for the conformance kit."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from quintet.hub.hf_config import find_config_class
from quintet.models import added, load_class
from quintet_tools.checkpoints.sizes import PLAIN

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


class AddedFamily(NamedTuple):
    """A family that can be compared: its small models, and the class that they are compared with."""

    configs: Mapping[str, Mapping[str, Any]]  # variant -> entries of config.json
    config_class: Callable[..., Any]
    reference: Callable[[Any], Any]  # config -> a model that transformers' save_pretrained() writes
    architecture: str | None  # for config.json, where the package adds the family by that name


def added_families() -> tuple[dict[str, AddedFamily], dict[str, str]]:
    """Returns the families by model_type; and the names of those that the kit cannot try, with reasons."""
    families: dict[str, AddedFamily] = {}
    reasons: dict[str, str] = {}
    for name in added():
        try:
            kind, family = _family(name)
        except ValueError as error:
            reasons[name] = str(error)
        else:
            families[kind] = family
    return families, reasons


def _family(name: str) -> tuple[str, AddedFamily]:
    """ValueError says what the package does not name."""
    model = load_class(name, added()[name])
    if getattr(model, "is_encoder", False):
        raise ValueError("the kit tries added families that generate, not encoders; compare its hidden states yourself")
    kind: str = getattr(getattr(model, "config_class", None), "model_type", name)
    config_class = find_config_class(kind, [name])
    reference_class = getattr(model, "reference_class", None)
    if reference_class is not None:
        reference: Callable[[Any], Any] = load_class(name, reference_class)
    elif config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        reference = _of_transformers
    else:
        raise ValueError(
            f"transformers has no causal language model for {config_class.__name__}, and {model.__qualname__} names "
            'no reference_class; set it to "package.module:Class", a PreTrainedModel to compare with'
        )
    configs = getattr(model, "reference_configs", None) or {"plain": {}}
    whole = {variant: {**PLAIN, **entries} for variant, entries in configs.items()}
    return kind, AddedFamily(whole, config_class, reference, None if name == kind else name)


def _of_transformers(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config, **EAGER)


def drawn(family: AddedFamily, settings: Mapping[str, Any]) -> Any:
    """Returns the reference model of these settings."""
    config = family.config_class(**settings)
    config._attn_implementation = "eager"
    return family.reference(config).float().eval()
