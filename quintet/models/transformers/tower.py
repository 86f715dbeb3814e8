"""Encoder of a multimodal wrapper's pictures: transformers' own vision tower and projector, without its text model."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quintet.layers.build import BuildContext
from quintet.layers.decoder import ModelBase
from quintet.media.items import MediaItem
from quintet.models.transformers.construct import EmptyTensors, Unsupported, explained, failure
from quintet.models.transformers.layer_replacement import float32_modules, loose_tensors
from quintet.models.transformers.layers import Rest
from quintet.models.transformers.weight_names import WeightNames

FIRST_ONLY = "batch_num_images"  # an argument that says how many equal pictures there are: one of them is wanted


class VisionTower(ModelBase):
    """Computes the rows that stand in the places of a picture's tokens, one picture at a time: no other changes it."""

    reads_towers = True
    recordable = False
    _theirs: Any

    def __init__(self, config: Any, build: BuildContext) -> None:
        """`config`: transformers' object, of the wrapper. Its parameters are on no device until they are read."""
        super().__init__()
        theirs = constructed(config, build.dtype)
        with explained(config, "taking its vision tower over"):
            self._names = WeightNames(theirs)
            self.ignored_tensors = tuple(
                f".*(?:{each}).*" for each in getattr(theirs, "_keys_to_ignore_on_load_unexpected", None) or ()
            )
            _drop_text(theirs)
            self._dtype = build.dtype
            self.rest = Rest(build, loose_tensors(theirs, float32_modules(theirs, build.dtype)))
        for name, module in theirs.named_children():
            self.add_module(name, module)
        self.__dict__["_theirs"] = theirs  # no module of ours: its parts are

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        with explained(self._theirs.config, "reading its tensors' names"):
            return self._names.gathered(entries)

    def module_name(self, name: str) -> str:
        """Returns the modules' name of a checkpoint's tensor."""
        with explained(self._theirs.config, "reading its tensors' names"):
            return self._names.renamed(name)

    @torch.inference_mode()
    def encode(self, item: MediaItem) -> tuple[Tensor, ...]:
        """Returns the rows of a picture, [item.count, H] for each level: those of its tokens, and of Qwen3-VL's first
        layers. ValueError if the tower gives another number of rows than the processor."""
        device = next(self.parameters()).device
        given = {name: self._on(torch.from_numpy(each.array().copy()), device) for name, each in item.fields.items()}
        out = self._theirs.get_image_features(**given, return_dict=True)
        levels = [getattr(out, "pooler_output", out), *(getattr(out, "deepstack_features", None) or ())]
        rows = tuple(_rows(each, FIRST_ONLY in given) for each in levels)
        for each in rows:
            if len(each) != item.count:
                raise ValueError(f"the vision tower gives {len(each)} rows for {item.count} tokens")
        return rows

    def _on(self, x: Tensor, device: torch.device) -> Tensor:
        """The argument on the tower's device, floats in the model's type."""
        return x.to(device, self._dtype) if x.is_floating_point() else x.to(device)


def constructed(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model of a wrapper's config, with one layer of text; parameters are on the meta device, buffers are computed.
    Unsupported if transformers does not build it."""
    from transformers import AutoModelForImageTextToText

    config = copy.deepcopy(config)
    _shorten(config.get_text_config())
    try:
        with EmptyTensors():
            model: nn.Module = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever a model's own code raises
        raise Unsupported(config, f"transformers does not build its vision tower ({failure(error)})") from error
    if not hasattr(model, "get_image_features"):
        raise Unsupported(config, f"{type(model).__name__} has no get_image_features()")
    return model.eval()


def _shorten(text: Any) -> None:
    """Leaves one layer of a text model: it is built, and dropped."""
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]


def _drop_text(model: Any) -> None:
    """Takes the text model and its head out of a wrapper."""
    dropped = [model.get_decoder(), model.get_output_embeddings()]
    for parent in (model, getattr(model, "model", None)):
        if parent is None:
            continue
        for name, child in list(parent.named_children()):
            if any(child is each for each in dropped):
                delattr(parent, name)


def _rows(features: Any, first_only: bool) -> Tensor:
    """Returns one tensor [rows, H] of what get_image_features() gives: a tensor [pictures, rows, H], or a list."""
    parts: Sequence[Tensor] = list(features)
    parts = parts[:1] if first_only else parts
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in parts])
