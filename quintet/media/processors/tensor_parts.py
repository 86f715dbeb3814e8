"""Loads transformers' video processors where torchvision is not installed.

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
from quintet.media.kinds import VIDEO

_FUNCTIONS = "torchvision.transforms.v2.functional"
_lock = threading.Lock()


def load_video_processor(model: MediaModel) -> Any:
    """Returns the video processor of a model's folder, by its family's class."""
    module, _, name = model.family.kinds[VIDEO].processor.partition(".")
    with _lock:
        found = getattr(_module(module), name)
    return found.from_pretrained(model.folder, local_files_only=True)


def _module(name: str) -> ModuleType:
    """Imports transformers' module of a video processor, with our functions in the place of torchvision's."""
    functions = importlib.import_module("quintet.media.processors.tensor_images")
    backends = importlib.import_module("transformers.image_processing_backends")
    for each in (backends, importlib.import_module("transformers.video_processing_utils")):
        if not hasattr(each, "tvF"):
            each.tvF = functions  # type: ignore[attr-defined]
    if not getattr(backends, "pil_torch_interpolation_mapping", None):
        backends.pil_torch_interpolation_mapping = functions.INTERPOLATIONS  # type: ignore[attr-defined]
    full = f"transformers.models.{name}.video_processing_{name}"
    if full in sys.modules:
        return sys.modules[full]
    with _standing_in(functions):
        return importlib.import_module(full)


@contextlib.contextmanager
def _standing_in(functions: ModuleType) -> Iterator[None]:
    """Within, an import of torchvision's functions gives ours."""
    names = [_FUNCTIONS]
    while "." in names[-1]:
        names.append(names[-1].rpartition(".")[0])
    made = {name: ModuleType(name) for name in names}
    made[_FUNCTIONS] = functions
    for name in names[:-1]:
        parent, _, last = name.rpartition(".")
        setattr(made[parent], last, made[name])
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
