"""Makes the description of a model's media of the configuration and the environment."""

from collections.abc import Collection, Mapping
from typing import Any

from quintet.config.schema.environment import Environment, read_environment
from quintet.media.info import DEFAULT_ITEMS, MediaInfo
from quintet.media.kinds import AUDIO, IMAGE, VIDEO


def media_info(
    config: Any,
    kinds: Collection[str] = (),
    placeholders: Mapping[str, str] | None = None,
    width: int = 0,
    environment: Environment | None = None,
) -> MediaInfo:
    """Returns the media of an EngineConfig's model, which takes these kinds.

    `placeholders`: kind -> text of an item in the prompt; `width`: numbers of a row of the encoder's output.
    """
    found = read_environment() if environment is None else environment
    limits = config.limit_mm_per_prompt or {}
    return MediaInfo(
        limits={kind: limits.get(kind, DEFAULT_ITEMS) for kind in kinds if not config.language_model_only},
        placeholders=dict(placeholders or {}),
        embeds_width=width if config.enable_mm_embeds else 0,
        local_path=config.allowed_local_media_path,
        domains=config.allowed_media_domains,
        io_options=dict(config.media_io_kwargs or {}),
        processor_options=dict(config.mm_processor_kwargs or {}),
        timeouts={
            IMAGE: found.image_fetch_timeout, VIDEO: found.video_fetch_timeout, AUDIO: found.audio_fetch_timeout
        },
    )  # fmt: skip
