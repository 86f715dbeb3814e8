"""Loads transformers' processors of videos, and of images that have no other, where torchvision is not installed.

Their modules import torchvision, for a few functions. tensor_images.py has these; how frames are chosen, resized and
cut into patches stays transformers' own code.
"""

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from quintet.media.families import MediaModel

_FUNCTIONS = "torchvision.transforms.v2.functional"
_lock = threading.Lock()


def load_tensor_part(model: MediaModel, kind: str) -> Any:
    """Returns the processor of a kind of media from a model's folder, by its family's class."""
    module, _, name = model.family.kinds[kind].processor.partition(".")
    word = "video" if name.endswith("VideoProcessor") else "image"
    with _lock:
        found = getattr(_module(f"transformers.models.{module}.{word}_processing_{module}"), name)
    return found.from_pretrained(model.folder, local_files_only=True)


def _module(full: str) -> ModuleType:
    """Imports transformers' module of a processor, with our functions in the place of torchvision's."""
    functions = importlib.import_module("quintet.media.processors.tensor_images")
    backends = importlib.import_module("transformers.image_processing_backends")
    for each in (backends, importlib.import_module("transformers.video_processing_utils")):
        if not hasattr(each, "tvF"):
            each.tvF = functions  # type: ignore[attr-defined]
    if not getattr(backends, "pil_torch_interpolation_mapping", None):
        backends.pil_torch_interpolation_mapping = functions.INTERPOLATIONS  # type: ignore[attr-defined]
    if full in sys.modules:
        return sys.modules[full]
    with _standing_in(functions):
        return importlib.import_module(full)


@contextlib.contextmanager
def _standing_in(functions: ModuleType) -> Iterator[None]:
    """Within, an import of torchvision's functions gives ours, also where it asks first whether they are there."""
    utils: Any = importlib.import_module("transformers.utils")
    asked = utils.is_torchvision_v2_available
    names = [_FUNCTIONS]
    while "." in names[-1]:
        names.append(names[-1].rpartition(".")[0])
    made = {name: ModuleType(name) for name in names}
    made[_FUNCTIONS] = functions
    for name in names[:-1]:
        parent, _, last = name.rpartition(".")
        setattr(made[parent], last, made[name])
    made["torchvision.transforms"].InterpolationMode = functions.InterpolationMode  # type: ignore[attr-defined]
    sys.modules.update(made)
    utils.is_torchvision_v2_available = lambda: True
    try:
        yield
    finally:
        utils.is_torchvision_v2_available = asked
        for name in names:
            del sys.modules[name]
