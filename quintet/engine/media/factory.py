"""Decides which kinds of media an engine takes, and with which sizes."""

import copy
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quintet.common.json_files import read_object
from quintet.config import EngineConfig
from quintet.config.media.info import media_info
from quintet.engine.media.rotary import RotaryIndex
from quintet.hub.hf_config import transformers_config
from quintet.hub.hf_overrides import merge_overrides, model_overrides
from quintet.interface.platform import Capabilities, Platform
from quintet.layers.row_store import RowStoreSizes
from quintet.media.audio.encoder_input import SpeechInput
from quintet.media.encoder_text import TextInput
from quintet.media.families import FAMILIES, MediaModel, attends_ahead, encoding_part, why_no_media
from quintet.media.info import MediaInfo
from quintet.media.input import MediaInput
from quintet.media.kinds import AUDIO, IMAGE
from quintet.model_loader.gguf_config import ENCODER, gguf_entries
from quintet.model_loader.sharded_state import FORMATS as SHARDED

if TYPE_CHECKING:
    from quintet.engine.executor.tower_part import TowerSizes


class ServedMedia(NamedTuple):
    """An engine's decision about media."""

    sizes: "TowerSizes | None"  # None: they are refused
    why: str = ""  # they are refused
    whole: Any = None  # the configuration, of the wrapper
    kinds: tuple[str, ...] = ()  # that are served

    @property
    def deep_layers(self) -> tuple[int, ...]:
        """Layers of the text model whose inputs rows of media are added to."""
        return () if self.sizes is None else self.sizes.deep_layers

    @property
    def whole_runs(self) -> bool:
        """True if tokens of a picture see one another."""
        return self.sizes is not None and attends_ahead(self.whole)

    @property
    def whole_prompts(self) -> bool:
        """True if tokens of a prompt see one another."""
        return self.sizes is not None and FAMILIES[self.whole.model_type].prefix

    def text_config(self, config: EngineConfig) -> tuple[Any, tuple[str, ...]]:
        """Returns the configuration of the text model, and patterns of tensors that it does not load: of an engine that
        encodes for others it has the layers alone that rows are added behind. ValueError if it encodes nothing."""
        text = self.whole.get_text_config()
        if config.ec_transfer_config.ec_connector is not None and self.sizes is None:
            raise ValueError(f"ec_transfer_config is for models whose media are encoded: {self.why}; leave it out")
        if config.ec_transfer_config.ec_connector is not None and FAMILIES[self.whole.model_type].alone:
            raise ValueError("ec_transfer_config: rows of this model are its answers, and are not shared; leave it out")
        tables = bool(getattr(text, "hidden_size_per_layer_input", 0))
        if tables or not config.ec_transfer_config.is_producer_alone:
            return text, ()  # tables of all layers' embeddings are one tensor
        if config.pipeline_parallel_size > 1:
            raise ValueError(
                "ec_role='ec_producer' has a language model of one layer; leave pipeline_parallel_size out"
            )
        from quintet.models.transformers.tower import shorten

        text = copy.deepcopy(text)
        shorten(text, 1 + max(self.deep_layers, default=0))
        return text, (r".*\.(?:layers|blocks|h)\.\d+\..*",)

    def rotary(self, longest: int) -> RotaryIndex | None:
        """Returns what computes positions where a token has three rotary ones, up to `longest`."""
        if self.sizes is None or not FAMILIES[self.whole.model_type].rotary:
            return None
        return RotaryIndex(self.sizes.hf_config, longest)

    def model(self, config: EngineConfig, folder: Path, rows: RowStoreSizes | None) -> MediaModel | None:
        """Returns what processes that admit requests must know; None: media are refused."""
        if self.sizes is None or rows is None:
            return None
        family = FAMILIES[self.whole.model_type]
        takes_rows = not (family.rotary or family.deepstack or family.alone)
        return MediaModel(
            model_type=self.whole.model_type,
            folder=str(folder),
            mmproj=config.mmproj or "",
            tokens={kind: _token(self.whole, kind) for kind in self.kinds},
            limits=dict(config.limit_mm_per_prompt or {}),
            max_rows=rows.rows,
            max_prompt_rows=0 if config.enable_chunked_prefill else rows.rows,
            max_run=self._max_run(config) if self.whole_runs else 0,
            max_prefix=self._max_run(config) if self.whole_prompts else 0,
            cache_bytes=int(config.mm_processor_cache_gb * 2**30),
            rows_width=self.whole.get_text_config().hidden_size if takes_rows else 0,
        )

    def _max_run(self, config: EngineConfig) -> int:
        """Returns how many tokens that see one another a step and a window hold."""
        window = getattr(self.whole.get_text_config(), "sliding_window", None)
        return min(config.step_tokens, window or config.step_tokens)


def whole_prompt_config(config: EngineConfig, media: ServedMedia, reasons: list[str]) -> EngineConfig:
    """Returns the settings of a model whose prompts are computed in one step; adds to `reasons`."""
    if not media.whole_prompts:
        return config
    reasons.append("enable_chunked_prefill=False: tokens of a prompt see one another, so that one step computes all")
    return config.replace(enable_chunked_prefill=False)


def media_limits(config: EngineConfig, model: MediaModel | None) -> MediaInfo:
    """Returns what callers may give of a model's media."""
    if model is None:
        return media_info(config)
    placeholders = {kind: model.family.kinds[kind].placeholder for kind in model.tokens}
    return media_info(config, model.tokens, placeholders, model.rows_width)


def taken_media(
    config: EngineConfig, model: MediaModel | None, encoder: SpeechInput | TextInput | None, why: str
) -> MediaInput | SpeechInput | TextInput | str:
    """Returns how prompts of the Python API get media: as parts of them, for the model's encoder, or not at all, for
    this reason. An encoder of text takes the prompts."""
    if encoder is not None:
        return encoder
    if model is None:
        return why
    from quintet.media.load_processor import load_processor

    return MediaInput(media_limits(config, model), lambda: load_processor(model))


class Checkpoint(NamedTuple):
    """A model's files, for this decision."""

    place: Path  # of config.json: resolve_config()'s
    whole: Any  # the configuration, of the wrapper
    backend: bool  # the text model runs by transformers' code


def served_media(config: EngineConfig, facts: Capabilities, platform: Platform, model: Checkpoint) -> ServedMedia:
    """Decides which media are served. Of a model that takes none by its config.json, nothing is known."""
    own = model.whole.get_text_config() is model.whole and model.whole.model_type not in FAMILIES
    if own or (model.place.is_file() and config.mmproj is None):
        return ServedMedia(None, "this model takes text alone", model.whole)
    why = _refusal(config, facts, platform, model)
    if why:
        why = f"images, video and audio are not served for this model of type {model.whole.model_type}: {why}"
        if config.runner != "pooling" and (family := FAMILIES.get(model.whole.model_type)) and family.prefix:
            raise ValueError(f"{why}, and its prompts of text are computed in the same way")
        return ServedMedia(None, why, model.whole)
    from quintet.engine.executor.tower_part import TowerSizes

    wrapper = encoding_part(_wrapper(config, model))
    kinds = tuple(kind for kind in _wanted(config, model) if isinstance(_token(model.whole, kind), int))
    quantized = None if config.mmproj is None else getattr(wrapper, ENCODER, None)
    sizes = TowerSizes(wrapper, _deep_layers(wrapper), config.ec_transfer_config, quantized)
    return ServedMedia(sizes, whole=model.whole, kinds=kinds)


def _deep_layers(wrapper: Any) -> tuple[int, ...]:
    """Returns the layers of a wrapper's text model whose inputs rows of media are added to."""
    if not FAMILIES[wrapper.model_type].deepstack:
        return ()
    try:
        if hasattr(wrapper, "spatial_target_layers"):  # Granite 4's
            layers = [layer for _, layer in wrapper.deepstack_layer_map or ()]
            found = tuple(dict.fromkeys([*layers, *wrapper.spatial_target_layers]))
        else:
            found = tuple(range(1, 1 + len(wrapper.vision_config.deepstack_visual_indexes or ())))
    except (TypeError, ValueError):
        found = (-1,)
    count = wrapper.get_text_config().num_hidden_layers
    if not all(isinstance(each, int) and 0 <= each < count for each in found):
        raise ValueError(
            f"config.json names no layers of its {count} that rows of media are added to (deepstack_visual_indexes, "
            "deepstack_layer_map, spatial_target_layers); correct it"
        )
    return found


def _wanted(config: EngineConfig, model: Checkpoint) -> list[str]:
    """Returns the kinds of the family that the settings leave."""
    limits = config.limit_mm_per_prompt or {}
    known = FAMILIES[model.whole.model_type].kinds if config.mmproj is None else (IMAGE,)
    return [kind for kind in known if limits.get(kind) != 0]


def _token(whole: Any, kind: str) -> Any:
    """Returns the token in whose places rows of an item stand; None if a wrapper's config names none."""
    family, part = FAMILIES[whole.model_type], encoding_part(whole)
    if family.alone:
        return 0
    if getattr(part, "audio_config" if kind == AUDIO else "vision_config", "") is None:  # it is without that encoder
        return None
    *parts, name = family.kinds[kind].token.split(".")
    return getattr(functools.reduce(getattr, parts, part), name, None)


def _refusal(config: EngineConfig, facts: Capabilities, platform: Platform, model: Checkpoint) -> str:
    """Returns why all media of a wrapper are refused; "" if they are not."""
    kind = model.whole.model_type
    if config.language_model_only:
        return "language_model_only is set"
    if why := why_no_media(kind):
        return why
    if not _wanted(config, model):
        return "limit_mm_per_prompt has 0 of each kind"
    if not any(isinstance(_token(model.whole, each), int) for each in _wanted(config, model)):
        return f"its config.json names no token for them ({FAMILIES[kind].kinds[_wanted(config, model)[0]].token})"
    if (facts.ops_only or facts.static_shapes) and not platform.encoder_platform:
        return f"platform {platform.name} runs no tower of transformers, which computes by torch"
    if facts.ops_only and (FAMILIES[kind].rotary or FAMILIES[kind].deepstack):
        return f"platform {platform.name} computes neither three rotary positions of a token nor rows of its layers"
    ahead = attends_ahead(model.whole) or (FAMILIES[kind].prefix and config.runner != "pooling")
    if ahead and "until" not in platform.optional_spec_fields:
        return f"tokens of a picture see one another, which platform {platform.name} does not compute"
    if config.load_format in SHARDED:
        return f"load_format={config.load_format!r} holds the text model alone"
    if config.speculative_config is not None and config.speculative_config.uses_model:
        return "a draft model or head gets no media; leave speculative_config out"
    if FAMILIES[kind].deepstack and config.pipeline_parallel_size > 1:
        return "rows for its first layers are on the first pipeline stage alone (pipeline_parallel_size)"
    if model.backend and (FAMILIES[kind].prefix or FAMILIES[kind].native or FAMILIES[kind].rotary):
        return "its text model reads media in other ways than text, which transformers' code of it does not get here"
    return ""


def _wrapper(config: EngineConfig, model: Checkpoint) -> Any:
    """Returns transformers' object of the wrapper's config, with the user's overrides."""
    if model.backend:
        return model.whole
    overrides, file = model_overrides(config), model.place / "config.json"
    raw = read_object(file) if config.mmproj is None else gguf_entries(model.place, config.mmproj)
    kind = model.whole.model_type
    made = transformers_config(kind, raw, file)
    if callable(overrides):
        return overrides(made)
    return transformers_config(kind, merge_overrides(raw, overrides, made.to_dict()), file) if overrides else made
