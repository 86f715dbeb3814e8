"""Texts that stand for media in prompts."""

from dataclasses import replace

from quintet.media.families import MediaModel
from quintet.media.info import MediaInfo
from quintet.media.items import IMAGE
from quintet.tokenizers.tokenizer import Tokenizer


def with_placeholders(info: MediaInfo, model: MediaModel, tokenizer: Tokenizer | None) -> MediaInfo:
    """Returns the media of a model with the text of an image, for chat templates that take text alone."""
    if tokenizer is None:
        return info
    return replace(info, placeholders={IMAGE: tokenizer.decode([model.placeholder_id], skip_special_tokens=False)})
