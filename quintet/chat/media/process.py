"""Prompts with images, video and audio, made ready for the model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quintet.chat.media.parts import media_error
from quintet.chat.prompts import Prompt
from quintet.media.errors import MediaError, MediaPackageMissing
from quintet.media.input import MediaInput
from quintet.media.parts import MediaPart
from quintet.sampling_params import ParameterError

Options = tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]  # media_io_kwargs, mm_processor_kwargs


async def run_media_inline(work: Callable[[], Any]) -> Any:
    """Runs work that waits for hosts and decoders in the calling thread."""
    return work()


def process_media(
    media: MediaInput, prompt: str | Sequence[int], parts: Sequence[MediaPart], options: Options, where: str
) -> Prompt:
    """Fetches and decodes media, and returns the prompt with them. Waits for hosts and decoders.

    ParameterError has the place of a part that cannot be used, or `where`; MediaPackageMissing has the command that
    installs what is missing.
    """
    try:
        made = media.process(prompt, parts, *options)
    except MediaPackageMissing:
        raise
    except MediaError as error:
        raise media_error(error, where) from None
    except ParameterError:
        raise
    except ValueError as error:
        raise ParameterError(where, f"cannot be made ready for the model: {error}", "invalid_media") from None
    return Prompt(made.token_ids, prompt if isinstance(prompt, str) else None, media=tuple(made.items))
