"""Encoders of a multimodal wrapper's media: transformers' own towers and projectors, without its text model."""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from quintet.layers.build import BuildContext
from quintet.layers.decoder import ModelBase
from quintet.media.families import FAMILIES
from quintet.media.items import ROWS, MediaItem
from quintet.model_loader.text_names import SPEAKING
from quintet.models.transformers.construct import EmptyTensors, Unsupported, explained, failure
from quintet.models.transformers.layer_replacement import float32_modules, loose_tensors
from quintet.models.transformers.layers import Rest
from quintet.models.transformers.tower_layers import replace_layers, use_attention, with_flat_kernels
from quintet.models.transformers.weight_names import WeightNames

_WHOLE = re.compile(r"(?:vlm|thinker)\.")  # what a model with a wrapper in it puts before the wrapper's names
FIRST_ONLY = "batch_num_images"  # an argument that says how many equal pictures there are: one of them is wanted


class MediaTower(ModelBase):
    """Computes the rows that stand in the places of a medium's tokens, one medium at a time: no other changes it."""

    reads_towers = True
    recordable = False
    _theirs: Any

    def __init__(self, config: Any, build: BuildContext) -> None:
        """`config`: transformers' object, of the wrapper. Its parameters are on no device until they are read."""
        super().__init__()
        theirs = constructed(config, build.dtype)
        self._kinds = FAMILIES[config.model_type].kinds
        with explained(config, "taking its towers over"):
            self._names = WeightNames(theirs)
            unexpected = getattr(theirs, "_keys_to_ignore_on_load_unexpected", None) or ()
            _drop_text(theirs)
            self._dtype, float32 = build.dtype, float32_modules(theirs, build.dtype)
            use_attention(theirs, build)
            self._patches = replace_layers(theirs, build, float32)
            loose = loose_tensors(theirs, float32)
            whole = [name for name, each in loose.items() if not each.tensor.is_floating_point()]
            self.rest = Rest(build, {**loose, **{name: replace(loose[name], stored=False) for name in whole}})
            self.ignored_tensors = (
                SPEAKING, *(f".*(?:{each}).*" for each in unexpected),
                *map(re.escape, whole),  # numbers that follow from the config, and counts of training
            )  # fmt: skip
        for name, module in theirs.named_children():
            self.add_module(name, module)
        self.__dict__["_theirs"] = theirs  # no module of ours: its parts are

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        entries = {_WHOLE.sub("", name): each for name, each in entries.items()}
        with explained(self._theirs.config, "reading its tensors' names"):
            return with_flat_kernels(self._names.gathered(entries), self._patches)

    def module_name(self, name: str) -> str:
        """Returns the modules' name of a checkpoint's tensor."""
        with explained(self._theirs.config, "reading its tensors' names"):
            return self._names.renamed(_WHOLE.sub("", name))

    @torch.inference_mode()
    def encode(self, item: MediaItem) -> tuple[Tensor, ...]:
        """Returns the rows of a medium, [item.count, H] for each level: those of its tokens, and of Qwen3-VL's first
        layers. ValueError if the tower gives another number of rows than the processor."""
        facts, device = self._kinds[item.kind], next(self.parameters()).device
        if ROWS in item.fields:
            return (self._on(torch.from_numpy(item.fields[ROWS].array().copy()), device),)
        given = {
            name: self._on(torch.from_numpy(each.array().copy()), device)
            for name, each in item.fields.items() if name not in facts.timing
        }  # fmt: skip
        out = self._encoded(facts.method, given)
        levels = [getattr(out, "pooler_output", out), *(getattr(out, "deepstack_features", None) or ())]
        if (mask := getattr(out, "attention_mask", None)) is not None:  # the last rows are of padding
            levels[0] = levels[0][mask]
        rows = tuple(_rows(each, FIRST_ONLY in given) for each in levels)
        for each in rows:
            if len(each) != item.count:
                raise ValueError(f"the {item.kind} tower gives {len(each)} rows for {item.count} tokens")
        return rows

    def _encoded(self, method: str, given: Mapping[str, Tensor]) -> Any:
        """Returns what the wrapper's method gives, or ours for one that has none."""
        if method:
            return getattr(_owner(self._theirs, method), method)(**given, return_dict=True)
        return METHODS[self._theirs.config.model_type](self._theirs, **given)

    def _on(self, x: Tensor, device: torch.device) -> Tensor:
        """The argument on the tower's device, floats in the model's type."""
        return x.to(device, self._dtype) if x.is_floating_point() else x.to(device)


def constructed(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model of a wrapper's config, with one layer of text; parameters are on the meta device, buffers are computed.
    Unsupported if transformers does not build it."""
    config = copy.deepcopy(config)
    shorten(config.get_text_config(), 1)  # it is built, and dropped
    try:
        with EmptyTensors():
            model: nn.Module = _auto_class(config).from_config(config, dtype=dtype)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever a model's own code raises
        raise Unsupported(config, f"transformers does not build its towers ({failure(error)})") from error
    for facts in FAMILIES[config.model_type].kinds.values():
        if facts.method and not hasattr(_owner(model, facts.method), facts.method):
            raise Unsupported(config, f"{type(model).__name__} has no {facts.method}(); install a newer transformers")
    if config.model_type == "phi4_multimodal":  # marked as causal, which torch obeys where an item fills its mask
        for module in model.modules():
            module.is_causal = False  # type: ignore[assignment]
    return model.eval()


def _owner(theirs: Any, method: str) -> Any:
    """Returns what has a method: the wrapper, or the model in it that has no head."""
    return theirs if hasattr(theirs, method) else getattr(theirs, "model", theirs)


def _auto_class(config: Any) -> Any:
    """Returns transformers' class that knows the wrapper."""
    import transformers

    for name in ("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
        found = getattr(transformers, name, None)
        if found is not None and type(config) in found._model_mapping:
            return found
    raise ValueError(f"no class for models of images, video or audio is {type(config).__name__}'s")


def shorten(text: Any, layers: int) -> None:
    """Leaves the first layers of a text model's configuration."""
    text.num_hidden_layers = min(layers, text.num_hidden_layers)
    if getattr(text, "num_kv_shared_layers", 0):
        text.num_kv_shared_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]


def _drop_text(model: Any) -> None:
    """Takes the text model and its head out of a wrapper."""
    if FAMILIES[model.config.model_type].alone:
        dropped = [getattr(model, name, None) for name in ("text_model", "text_projection")]
    elif within := FAMILIES[model.config.model_type].within:
        others = [child for name, child in model.model.named_children() if name != within]
        dropped = [*others, model.get_output_embeddings()]
    else:
        dropped = [model.get_decoder(), model.get_output_embeddings(), getattr(model, "language_model", None)]
    for parent in (model, getattr(model, "model", None)):
        if parent is None:
            continue
        for name, child in list(parent.named_children()):
            if any(child is each for each in dropped):
                delattr(parent, name)


def _qwen2_audio(theirs: Any, input_features: Tensor, feature_attention_mask: Tensor) -> Tensor:
    """Returns rows of recordings, [recordings, rows, H]. Source: Qwen2AudioModel.forward(), where it is no method."""
    from transformers.masking_utils import create_bidirectional_mask

    model = getattr(theirs, "model", theirs)
    tower = model.audio_tower
    frames, rows = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    length = (input_features.shape[-1] - 2) // 2 + 1  # behind the second convolution
    there = torch.arange(length, device=frames.device)[None] < frames[:, None]
    shaped = input_features.new_zeros(len(frames), length, 1)
    mask = create_bidirectional_mask(config=tower.config, inputs_embeds=shaped, attention_mask=there.long())
    found: Tensor = model.multi_modal_projector(tower(input_features, attention_mask=mask).last_hidden_state)
    return found[:, : int(rows.max())]


def _llama4(theirs: Any, pixel_values: Tensor) -> Tensor:
    """Returns rows of an image's tiles, [tiles, rows, H]. Source: Llama4ForConditionalGeneration.forward()."""
    found: Tensor = theirs.multi_modal_projector(theirs.vision_model(pixel_values).last_hidden_state)
    return found


def _granite4_vision(theirs: Any, **fields: Tensor) -> SimpleNamespace:
    """Returns zeros for embeddings, and what is added to layers' inputs; of two for one layer, the last."""
    rows = dict(theirs.get_image_features(**fields, return_dict=True).deepstack_features)
    deep = [each if isinstance(each, Tensor) else torch.cat(list(each)) for each in rows.values()]
    return SimpleNamespace(pooler_output=torch.zeros_like(deep[0]), deepstack_features=deep)


def _phi4_multimodal(theirs: Any, **fields: Tensor) -> Tensor:
    """Returns rows of images or recordings, by what puts them into embeddings of a prompt."""
    pictures, config = fields.pop("num_img_tokens", None), theirs.config
    counts = fields["audio_embed_sizes"] if pictures is None else pictures
    token = config.audio_config.audio_token_id if pictures is None else config.vision_config.image_token_id
    ids = counts.new_full((1, int(counts.sum())), token, dtype=torch.long)
    rows = torch.zeros(*ids.shape, config.hidden_size, dtype=theirs.dtype, device=ids.device)
    found: Tensor = theirs.model.embed_tokens_extend(ids, rows, **fields)
    return found


def _vibevoice_asr(theirs: Any, input_values: Tensor, padding_mask: Tensor) -> Tensor:
    """Returns rows of recordings, without the noise that would be drawn anew for each."""
    made = theirs.get_audio_features(input_values=input_values, padding_mask=padding_mask, sample=False)
    found: Tensor = made.pooler_output
    return found


def _video_llama_3(theirs: Any, video_compression_mask: Tensor, **fields: Tensor) -> Tensor:
    """Returns rows of a video, without those that are like the frame before."""
    rows = theirs.model.get_video_features(**fields, return_dict=True).pooler_output
    return torch.cat(list(rows))[video_compression_mask]


# of wrappers whose KindFacts name no method
METHODS: dict[str, Callable[..., Any]] = {
    "granite4_vision": _granite4_vision,
    "llama4": _llama4,
    "phi4_multimodal": _phi4_multimodal,
    "qwen2_audio": _qwen2_audio,
    "vibevoice_asr": _vibevoice_asr,
    "video_llama_3": _video_llama_3,
}


def _rows(features: Any, first_only: bool) -> Tensor:
    """Returns one tensor [rows, H] of what a wrapper's method gives: a tensor [.., rows, H], or a list of such."""
    if isinstance(features, Tensor) and not first_only:
        return features.reshape(-1, features.shape[-1])
    parts: Sequence[Tensor] = list(features)
    parts = parts[:1] if first_only else parts
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in parts])
