"""Loads a model's processor from its folder.

Without torchvision, images are processed by Pillow and NumPy, and videos, and images of models that have no such
processor, by transformers' code on torch's functions.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from quintet.common.distribution import install_hint
from quintet.media.families import MediaModel
from quintet.media.items import MediaProcessor
from quintet.media.kinds import AUDIO, IMAGE
from quintet.media.processing import LONGEST, HFMediaProcessor
from quintet.media.processors.gguf import load_gguf_processor
from quintet.media.processors.image_prompts import ImagePromptProcessor
from quintet.media.processors.parts import ATTRIBUTES, OTHER_ATTRIBUTES, with_own_parts
from quintet.media.processors.tensor_parts import load_tensor_part
from quintet.media.processors.voxtral import load_voxtral

FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")  # that may name the class
# wrappers whose own processor takes no text beside pictures -> the processor of the same files that does
STAND_INS = {"colpali": "PaliGemmaProcessor", "colqwen2": "Qwen2VLProcessor"}
PARTS = {"tokenizer", *ATTRIBUTES.values(), *OTHER_ATTRIBUTES.values()}  # that are loaded here


def load_processor(model: MediaModel) -> MediaProcessor:
    """Returns the processor of a model. Imports transformers, which takes seconds. ValueError says what is missing."""
    if importlib.util.find_spec("PIL") is None and set(model.tokens) - {AUDIO}:
        raise ValueError(f"images need the package pillow, which is not installed: {install_hint('image')}")
    try:
        if model.family.alone:
            return ImagePromptProcessor(model, _part(ATTRIBUTES[IMAGE], model))
        return HFMediaProcessor(model, _processor(model))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever transformers raises, in any version of it
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]
        none = json.dumps(dict.fromkeys(model.tokens, 0))
        raise ValueError(
            f"{model.folder}: the processor of media cannot be loaded ({reason}); install what it names or fetch the "
            f"model again, or start with limit_mm_per_prompt={none} for text alone"
        ) from error


def _processor(model: MediaModel) -> Any:
    if model.mmproj:
        return load_gguf_processor(model, _class)
    if model.model_type == "voxtral":
        return load_voxtral(model.folder)
    if importlib.util.find_spec("torchvision") is not None and model.model_type not in STAND_INS:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(model.folder, local_files_only=True, trust_remote_code=False)
    return _without_torchvision(_class_of(model), model)


def _class_of(model: MediaModel) -> Any:
    """Returns transformers' class, by the files or by the model's type."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    if model.model_type in STAND_INS:
        return _class(STAND_INS[model.model_type])
    named = [_entries(Path(model.folder) / name).get("processor_class") for name in FILES]
    name = next((each for each in named if isinstance(each, str)), PROCESSOR_MAPPING_NAMES.get(model.model_type))
    return _class(str(name))


def _without_their_import() -> None:
    """Imports Pixtral's processor, whose module takes a function from one that needs torchvision; the module for Pillow
    has the same."""
    name = "transformers.models.pixtral"
    if f"{name}.image_processing_pixtral" in sys.modules or f"{name}.processing_pixtral" in sys.modules:
        return
    stands_in = importlib.import_module(f"{name}.image_processing_pil_pixtral")
    sys.modules[f"{name}.image_processing_pixtral"] = stands_in
    try:
        importlib.import_module(f"{name}.processing_pixtral")
    finally:
        del sys.modules[f"{name}.image_processing_pixtral"]


def _class(name: str) -> Any:
    """Returns a processor's class by its name. ValueError if transformers has none."""
    from transformers.models.auto.processing_auto import processor_class_from_name

    _without_their_import()
    loaded = sys.modules.get("transformers.models.pixtral.processing_pixtral")
    found = getattr(loaded, name, None) or processor_class_from_name(name)
    if found is None:
        raise ValueError(f"transformers has no processor {name!r}")
    return found


def _entries(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    found = json.loads(file.read_text())
    return found if isinstance(found, dict) else {}


def _without_torchvision(processor: Any, model: MediaModel) -> Any:
    """Makes a processor of parts that need no torchvision. Parts of kinds that are not served may be missing."""

    names = processor.get_attributes()
    if extra := set(names) - PARTS:
        raise ValueError(f"{processor.__name__} has parts that are not loaded here: {', '.join(sorted(extra))}")
    settings, _ = processor.get_processor_dict(model.folder, local_files_only=True)
    return with_own_parts(processor).from_args_and_dict([_part(name, model) for name in names], settings)


def _part(name: str, model: MediaModel) -> Any:
    """Returns a part of a processor; None for one of a kind that is not served."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

    kinds = model.family.kinds if model.family.numbered else model.tokens  # that processor asks all of its parts
    wanted = {each for kind in kinds for each in (ATTRIBUTES[kind], OTHER_ATTRIBUTES.get(kind))}
    wanted |= {"tokenizer", ATTRIBUTES[IMAGE]}
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if name not in wanted:
        return None
    known = model.family.kinds
    kind = next((each for each, facts in known.items() if ATTRIBUTES[each] == name and facts.processor), "")
    if kind:
        return load_tensor_part(model, kind)
    if name == ATTRIBUTES[IMAGE]:
        return AutoImageProcessor.from_pretrained(model.folder, backend="pil", **options)
    return (AutoTokenizer if name == "tokenizer" else AutoFeatureExtractor).from_pretrained(model.folder, **options)
