"""Draft heads as their authors publish them: EAGLE's and DFlash's own files, and those of the speculators library."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quintet.common.json_files import read_object
from quintet.engine.executor.model_part import DraftHeadSizes
from quintet.hub.config_checks import check_entries, check_shape, names_head
from quintet.hub.hf_config import read_config
from quintet.interface.types import IntArray
from quintet.interface.weights import StoredTensor
from quintet.layers.decoder import CausalLM
from quintet.model_loader.loader import tensors_of
from quintet.model_loader.weight_files import WeightFiles
from quintet.models.draft_heads.base import DraftHead
from quintet.models.draft_heads.dflash import DFlashHead, DSparkHead
from quintet.models.draft_heads.eagle import Eagle3Head, EagleHead, PEagleHead
from quintet.models.draft_heads.gemma4_assistant import Gemma4AssistantHead
from quintet.models.draft_heads.mtp import LAYOUTS, mtp_head

SPECULATORS = "speculators_model_type"
MARKOV = "markov_head.markov_w1.weight"  # a DSpark's table of tokens
# vLLM's, of each kind
METHOD_OF = {"eagle": "eagle", "eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dspark": "dspark"}
FAMILIES: Mapping[str, type[DraftHead]] = {
    "eagle": EagleHead, "eagle3": Eagle3Head, "peagle": PEagleHead, "dflash": DFlashHead,
    "dspark": DSparkHead,
}  # fmt: skip
SIZES = {"hidden_size": "hidden_size", "vocab_size": "vocab_size"}
GEMMA4_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
# Of DFlash's and DSpark's authors, and those of speculators and vLLM; other successors (DFlash2, XPress) have their own
DFLASH_CLASSES = (
    "DFlashDraftModel", "DFlashSpeculator", "DFlashQwen3ForCausalLM",
    "DSparkDraftModel", "DSparkSpeculator", "Qwen3DSparkModel",
)  # fmt: skip
# Entries of a DFlash head, in its config.json or in the dflash_config there, that change how it computes
DFLASH_VARIANTS = (
    "use_swa", "causal", "is_causal", "attention_sink_bias", "attention_value_scale", "dspark_draft_topk",
)  # fmt: skip


def is_head(folder: Path) -> bool:
    """Returns whether a folder's config.json is that of a draft head, and not of a model by itself."""
    if not (folder / "config.json").is_file():
        return False
    raw = read_object(folder / "config.json")
    return (
        SPECULATORS in raw
        or "draft_vocab_size" in raw
        or raw.get("model_type") in GEMMA4_ASSISTANTS
        or names_head(raw.get("architectures"))
    )


def read_head(folder: Path, weights: WeightFiles, target: Any, method: str | None) -> tuple[Any, DraftHeadSizes]:
    """Reads a head's configuration, with the entries that its family reads beside Llama's, and its other facts.
    `target`: the configuration of the model that it proposes to.

    ValueError if it is not such a head, or is another model's.
    """
    file = folder / "config.json"
    raw = read_object(file)
    check_entries(raw, str(file))  # those of transformer_layer_config, too
    if raw.get("model_type") in GEMMA4_ASSISTANTS:
        return _read_assistant(raw, file, target, method)
    if method == "gemma4_mtp":  # mtp with a model is this
        raise ValueError(
            f"{folder} is no assistant of Gemma 4, the only model that an mtp method takes; for the head in the "
            "model's own checkpoint leave speculative_config.model out, with method 'mtp'; else leave method out"
        )
    entries = _entries(raw, file)
    tensors = tensors_of(weights, DraftHead)
    kind = _kind(raw, tensors)
    _check_class(raw, kind, file)
    if "fc.weight" not in tensors:
        raise ValueError(f"{folder} holds no draft head: fc.weight is missing; use method 'draft_model' for a model")
    _check_method(method, METHOD_OF[kind], folder)
    config = read_config("qwen3" if entries.get("model_type") == "qwen3" else "llama", entries, file)
    check_shape(config, str(file))
    config.fusion_bias = "fc.bias" in tensors
    config.norm_before_residual = bool(raw.get("norm_before_residual", False))
    config.norms_heads = any(name.endswith("self_attn.q_norm.weight") for name in tensors)
    config.has_embedding = "embed_tokens.weight" in tensors
    config.has_head = kind != "eagle" and "lm_head.weight" in tensors
    layers = (target.num_hidden_layers,) if kind == "eagle" else _layers(raw, target)
    config.num_taps = len(layers)
    token_ids = _token_ids(tensors, target.vocab_size, folder)
    config.draft_vocab_size = target.vocab_size if token_ids is None else len(token_ids)
    _check(config, target, folder)
    mask = _mask_token_id(raw, config, file) if FAMILIES[kind].drafts_block else None
    anchored = _draws_at_anchor(raw, kind, file) if mask is not None else False
    if kind == "dspark":
        config.markov_rank = raw.get("markov_rank")
    return config, DraftHeadSizes(FAMILIES[kind], layers, token_ids, mask, anchored)


def _check_method(method: str | None, own: str, folder: Path) -> None:
    """ValueError where another method was asked for than the head's."""
    if method not in (None, own):
        raise ValueError(f"{folder} holds a head for method {own!r}, not {method!r}; set speculative_config.method so")


def _read_assistant(raw: Mapping[str, Any], file: Path, target: Any, method: str | None) -> tuple[Any, DraftHeadSizes]:
    """Reads the configuration of Gemma 4's assistant: of its layers, with the entries around it."""
    _check_method(method, "gemma4_mtp", file.parent)
    whole = read_config(raw["model_type"], raw, file)
    config = whole.get_text_config()
    check_shape(config, str(file))
    if target.model_type not in ("gemma4_text", "gemma4_unified_text"):
        raise ValueError(f"{file} is Gemma 4's assistant, and the model is {target.model_type}; use method 'ngram'")
    for name in ("backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k"):
        setattr(config, name, getattr(whole, name))
    config.tie_word_embeddings = whole.tie_word_embeddings
    ordered, clusters, chosen = config.use_ordered_embeddings, config.num_centroids, config.centroid_intermediate_top_k
    divides = clusters > 0 and config.vocab_size % clusters == 0
    if ordered and not (divides and 0 < chosen <= clusters and config.tie_word_embeddings):
        raise ValueError(
            f"{file}: {clusters} clusters, of which {chosen} are chosen, do not divide a head of {config.vocab_size} "
            "tokens that is the token embedding; fetch the head again"
        )
    _check(config, target, file.parent, {"backbone_hidden_size": "hidden_size", "vocab_size": "vocab_size"})
    config.has_embedding = config.has_head = False
    config.draft_vocab_size = config.vocab_size
    return config, DraftHeadSizes(Gemma4AssistantHead, (target.num_hidden_layers,))


def _kind(raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> str:
    """Returns what kind of head a folder holds: a key of FAMILIES."""
    if "hidden_norm.weight" in tensors:
        return "dspark" if MARKOV in tensors else "dflash"
    if "mask_hidden" in tensors or raw.get(SPECULATORS) == "peagle":
        return "peagle"
    return "eagle3" if any(name.endswith("hidden_norm.weight") for name in tensors) else "eagle"


def _check_class(raw: Mapping[str, Any], kind: str, file: Path) -> None:
    """ValueError where the file names a class that computes otherwise than DFlash does, from the same tensors."""
    names: list[str] = raw.get("architectures") or []
    eagle = kind not in ("dflash", "dspark") and (not names_head(names) or "eagle" in names[0].lower())
    if names and not eagle and names[0] not in DFLASH_CLASSES:
        raise ValueError(
            f"{file}: draft heads of class {names[0]!r} are not supported; use one of EAGLE, or of "
            f"{', '.join(DFLASH_CLASSES)}"
        )


def _mask_token_id(raw: Mapping[str, Any], config: Any, file: Path) -> int:
    """Returns the token that stands for those of a block; ValueError if there is none, or the head computes in a way
    that is not served."""
    own = _inner(raw, "dflash_config")
    variants = [name for name in DFLASH_VARIANTS if own.get(name) or raw.get(name)]
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        variants.append("sliding_attention")
    if variants:
        raise ValueError(f"{file}: draft heads with {', '.join(variants)} are not supported; use another head")
    places = (own.get("mask_token_id"), *(raw.get(name) for name in ("mask_token_id", "ptd_token_id", "pard_token")))
    mask = next((each for each in places if each is not None), None)
    if type(mask) is not int or not 0 <= mask < config.vocab_size:
        raise ValueError(
            f"{file}: mask_token_id is {mask!r}, not a token below {config.vocab_size}; fetch the head again"
        )
    return mask


def _draws_at_anchor(raw: Mapping[str, Any], kind: str, file: Path) -> bool:
    """Returns whether a block's first token draws: of a DSpark, unless its file says otherwise or speculators wrote it.
    ValueError where a head draws otherwise than is served."""
    given = _inner(raw, "dflash_config").get("sample_from_anchor", raw.get("sample_from_anchor"))
    if kind != "dspark":
        if given:
            raise ValueError(f"{file}: draft heads with sample_from_anchor are not supported; use another head")
        return False
    markov, rank, scale = raw.get("markov_head_type", "vanilla"), raw.get("markov_rank"), raw.get("logit_scale", 1.0)
    if markov != "vanilla" or type(rank) is not int or rank < 1 or scale != 1.0:
        raise ValueError(
            f"{file}: draft heads with markov_head_type {markov!r}, markov_rank {rank!r} and logit_scale {scale!r} are "
            "not supported; use one of type 'vanilla' with a rank of at least 1, without a scale"
        )
    return SPECULATORS not in raw if given is None else bool(given)


def _entries(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Returns the entries of the head's Llama layer."""
    kind = raw.get(SPECULATORS)
    if kind is None:
        return dict(raw)
    inner = raw.get("transformer_layer_config")
    if kind not in ("eagle3", "peagle", "dflash", "dspark") or not isinstance(inner, Mapping):
        raise ValueError(
            f"{file}: {SPECULATORS} {kind!r} is not supported; heads of type 'eagle3', 'peagle', 'dflash' and "
            "'dspark' are"
        )
    return dict(inner)


def _inner(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the entries of an entry; none where it is no mapping."""
    found = raw.get(name)
    return found if isinstance(found, Mapping) else {}


def _layers(raw: Mapping[str, Any], target: Any) -> tuple[int, ...]:
    """Returns the layers that a head reads: those of its configuration, or the three of EAGLE-3's authors."""
    count, name = target.num_hidden_layers, "eagle_aux_hidden_state_layer_ids"
    given = raw.get(name) or _inner(raw, "eagle_config").get(name) or raw.get("aux_hidden_state_layer_ids")
    after = _inner(raw, "dflash_config").get("target_layer_ids", raw.get("target_layer_ids"))  # those that give them
    if given is None and isinstance(after, list):
        given = [each + 1 if type(each) is int else each for each in after]
    layers: Sequence[Any] = given if isinstance(given, list) else (2, count // 2, count - 3)
    if any(type(each) is not int or not 0 <= each <= count for each in layers) or len(set(layers)) != len(layers):
        raise ValueError(
            f"the draft head reads the hidden states of layers {list(layers)}, and the model has {count} layers; use a "
            "head that was trained for this model"
        )
    return tuple(sorted(layers))


def _token_ids(tensors: Mapping[str, StoredTensor], vocab_size: int, folder: Path) -> IntArray | None:
    """Returns the model's token of each that the head draws: "d2t" holds the difference."""
    stored = tensors.get("d2t")
    if stored is None or stored.read is None:
        return None
    offsets = stored.read().long().numpy()
    found = offsets + np.arange(len(offsets))
    if offsets.ndim != 1 or not len(found) or found.min() < 0 or found.max() >= vocab_size:
        raise ValueError(f"{folder}: d2t names tokens that the model does not have ({vocab_size}); fetch it again")
    return found.astype(np.int32)


def _check(config: Any, target: Any, folder: Path, entries: Mapping[str, str] = SIZES) -> None:
    """ValueError where the head was made for a model of other sizes. `entries`: of the head -> of the model."""
    for name, others in entries.items():
        own, other = getattr(config, name), getattr(target, others)
        if own != other:
            raise ValueError(
                f"{folder}: the draft head has {name} {own}, and the model {other}; use a head that was trained for "
                "this model"
            )


def mtp_head_of(family: type[CausalLM], target: Any, tensors: Mapping[str, StoredTensor]) -> tuple[Any, DraftHeadSizes]:
    """Returns the configuration and the facts of the head for multi-token prediction in a model's own checkpoint.

    ValueError if the model's family has none here, or its files do not hold it.
    """
    layout, layers = LAYOUTS.get(target.model_type), target.num_hidden_layers
    if layout is None:
        raise ValueError(
            f"speculative_config.method 'mtp': {target.model_type} models have no such head here; those of "
            f"{', '.join(LAYOUTS)} have; use 'ngram'"
        )
    product = f"{layout.product.format(L=layers)}.weight"
    if product not in tensors:
        raise ValueError(
            f"speculative_config.method 'mtp': the checkpoint holds no {product}, so it was published without its head "
            "for multi-token prediction; use 'ngram'"
        )
    config = copy.copy(target)
    config.has_embedding = config.has_head = False
    config.draft_vocab_size = target.vocab_size
    return config, DraftHeadSizes(mtp_head(family), (layers,))
