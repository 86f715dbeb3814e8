"""Media that a caller of the Python API gives beside a prompt: multi_modal_data, multi_modal_uuids and the like."""

from collections.abc import Mapping, Sequence
from typing import Any

from quintet.media.arrays import parts_of_data
from quintet.media.errors import MediaError
from quintet.media.input import MediaInput
from quintet.media.items import ProcessedPrompt

KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "media_io_kwargs")  # of a prompt that is a dict


def process_prompt(
    media: MediaInput, prompt: str | Sequence[int], given: Mapping[str, Any], salt: str | None
) -> ProcessedPrompt | None:
    """Returns the prompt's tokens and media; None if it has no media. `given`: entries of KEYS. `salt`: cache_salt:
    names of one tenant's media are not those of others. ValueError says what is wrong."""
    options = given.get("mm_processor_kwargs") or {}
    if not isinstance(options, Mapping):
        raise ValueError(f"'mm_processor_kwargs' is of type {type(options).__name__}, and must be a dict")
    try:
        parts = parts_of_data(given.get("multi_modal_data") or {}, given.get("multi_modal_uuids"), salt or "")
        return media.process(prompt, parts, given.get("media_io_kwargs"), options) if parts else None
    except MediaError as error:
        raise ValueError(f"{error.where or 'multi_modal_data'} cannot be used: {error}") from None
