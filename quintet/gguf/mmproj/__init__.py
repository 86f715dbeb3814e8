"""Encoders of images in GGUF files of their own (mmproj), which lie beside a language model's."""

from collections.abc import Mapping, Sequence
from typing import Any

from quintet.gguf.cursor import Array
from quintet.gguf.mmproj.projector import Projector
from quintet.gguf.mmproj.qwen import QWEN
from quintet.gguf.mmproj.siglip import SIGLIP
from quintet.gguf.model import GGUFModel

PROJECTORS: Mapping[str, Projector] = {**SIGLIP, **QWEN}  # by clip.projector_type
SHARED = ("quantization_config", "dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
REMEDY = "start with language_model_only for text alone"


def projector_of(mmproj: GGUFModel) -> Projector:
    """Returns the row of a file's projector. ValueError if it is no such file, or of a type that is not read."""
    if not mmproj.is_mmproj:
        raise ValueError(f"{mmproj.path} is of architecture {mmproj.prefix[:60]!r}, and no encoder of images (mmproj)")
    kind = mmproj.metadata.get("clip.projector_type", mmproj.metadata.get("clip.vision.projector_type"))
    found = PROJECTORS.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise ValueError(
            f"{mmproj.path}: images of projector type {str(kind)[:60]!r} are not served; those of "
            f"{', '.join(PROJECTORS)} are: {REMEDY}"
        )
    return found


def wrapper_config(text: Mapping[str, Any], model: GGUFModel, mmproj: GGUFModel) -> dict[str, Any]:
    """Returns config.json's entries of the multimodal model that a text model, with its `text` entries, and an encoder
    make together. ValueError says why they do not."""
    projector = projector_of(mmproj)
    kind = projector.wrapper_of(str(text["model_type"]), mmproj)
    width = projector.text_width(mmproj)
    if width != text["hidden_size"]:
        raise ValueError(
            f"{mmproj.path} makes rows of {width} numbers, and {model.path} has tokens of {text['hidden_size']}: they "
            f"are of different models; give the mmproj file that was published with it, or {REMEDY}"
        )
    tokens = token_ids(model, mmproj, projector.tokens)
    projector.processor_settings(mmproj)  # refused here, and not with the first picture
    own = {**text, "model_type": projector.text_types.get(str(text["model_type"]), text["model_type"])}
    entries = {name: text[name] for name in SHARED if name in text}
    return {**entries, **projector.config(mmproj), **tokens, "model_type": kind, "text_config": own}


def token_ids(model: GGUFModel, mmproj: GGUFModel, wanted: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Returns the ids of tokens, for each name the first that the vocabulary has."""
    words = model.metadata.get("tokenizer.ggml.tokens")
    listed = list(words) if isinstance(words, Array) else []
    known = {each for names in wanted.values() for each in names}
    found = {word: number for number, word in enumerate(listed) if word in known}
    ids: dict[str, int] = {}
    for entry, names in wanted.items():
        here = [found[each] for each in names if each in found]
        if not here:
            raise ValueError(
                f"{model.path} has no token {names[0]!r} in its vocabulary, which images of {mmproj.path} stand for; "
                f"give another conversion of the model, or {REMEDY}"
            )
        ids[entry] = here[0]
    return ids
