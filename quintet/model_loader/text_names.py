"""Names of a text model's tensors in the files of a multimodal model: towers of other modalities are passed over."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from quintet.config import EngineConfig
from quintet.model_loader.weight_files import WeightFiles, format_names

# what wrappers put around the names of their text model; behind "model." comes its trunk, without a head
_WRAPPED = re.compile(r"(?:thinker\.|vlm\.)?(?P<trunk>model\.)?(?:language_model|text_model|llm)\.(?P<name>.+)")
_TRUNK = re.compile(r"(layers|embed_tokens|norm|embed_tokens_per_layer|embedding_norm)\.")  # without "model."
_LAYERS = re.compile(r"model\.(blocks|encoder\.layers)\.")  # transformers 5.23 saves layers of some under these names
_HEAD = re.compile(
    r"(?:thinker\.|vlm\.)?(?P<name>(lm_head|embedding_proj_layer|score|classifier|v_head|value_head|rank_head"
    r"|text_projection)\..+)"
)
# beside a text model that has no prefix: parts that encode or make images, audio and video, and join them to the text;
# projector.0 and projector.2 are a head's
_TOWER = re.compile(
    r"(model\.)?(visual|vit|vision_tower|vision_model|vision_encoder|vision_language_adapter|vision_projection"
    r"|embed_tokens_extend|sam_model|qwen2_model|projector(?!\.[02]\.)|view_seperator|multi_modal_projector"
    r"|mm_projector|mlp_AR|patch_merger|pre_mm_projector_norm|audio_tower|audio_encoder|talker|token2wav|code2wav)"
    r"(\..+)?"
)
SPEAKING = r"(?:talker|token2wav|code2wav)\..+"  # parts of models that speak, which nothing here computes
# of models that speak: the part that writes; of those for late interaction: the part behind which is a projection
_PARTS = ("thinker.", "vlm.")

TextName = Callable[[str], str | None]


def text_names(names: Iterable[str]) -> TextName:
    """Returns a function of a tensor's name in these files -> its name in the text model; None for a tower's tensor."""
    known = list(names)
    if any(_WRAPPED.fullmatch(name) for name in known):
        return _unwrapped
    part = next((each for each in _PARTS if any(name.startswith(each) for name in known)), "")
    if part:
        return lambda name: _without_towers(name.removeprefix(part)) if name.startswith(part) else None
    return _without_towers


def _unwrapped(name: str) -> str | None:
    """model.language_model.layers.0..., language_model.model.layers.0... -> model.layers.0..."""
    match = _WRAPPED.fullmatch(name) or _HEAD.fullmatch(name)
    if match is None:
        return None
    own = _LAYERS.sub("model.layers.", match["name"])
    is_trunk = match.groupdict().get("trunk") and not own.startswith(("model.", "lm_head."))
    return f"model.{own}" if is_trunk or _TRUNK.match(own) else own


def _without_towers(name: str) -> str | None:
    return None if _TOWER.fullmatch(name) else name


def _tower_of(name: str) -> str:
    """Returns the part of a multimodal model that a tower's tensor is of: model.vision_tower.x -> vision_tower."""
    parts = [part for part in name.split(".") if part not in ("model", "thinker")]
    return parts[0] if parts else name


def describe_files(
    config: EngineConfig, family: str, weights: WeightFiles, why: str, kinds: Sequence[str] = ()
) -> list[str]:
    """Describes what is special about a model's files: pickles, and parts of a multimodal model beside its text.
    `why`: its media are refused; "" where some are served, which are of these `kinds`."""
    if weights.folder.is_file():
        return []
    if weights.load_format == "pt" and config.load_format == "auto":
        only = f"weights: {weights.folder} has only what torch.save wrote; it is read without running what is in it"
        return [only, *_describe_towers(family, weights, why, kinds)]
    return _describe_towers(family, weights, why, kinds)


def _describe_towers(family: str, weights: WeightFiles, why: str, kinds: Sequence[str]) -> list[str]:
    names = [name for _, handle in weights.open_files() for name in handle.keys()]
    text_name = text_names(names)
    passed = [name for name in names if text_name(name) is None and (why or re.fullmatch(SPEAKING, name))]
    listed = format_names([f"{tower} ({count})" for tower, count in Counter(map(_tower_of, passed)).most_common()])
    what = f"text of a multimodal model runs as {family}"
    over = f". Tensors of other parts are passed over: {listed}" if passed else ""
    if not why:
        return [f"{what}, and transformers' code encodes {' and '.join(kinds)}{over}"]
    return [f"{what}; {why}{over}"] if passed else []
