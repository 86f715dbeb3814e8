"""The way of media into prompts: from what callers give to token ids and items for the encoder."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quintet.media.info import MediaInfo
from quintet.media.items import MediaProcessor, ProcessedPrompt
from quintet.media.parts import MediaPart
from quintet.media.reader import MediaReader

MAX_PROCESSOR_OPTIONS = 64  # entries of mm_processor_kwargs


class MediaInput:
    """Makes prompts with media ready for one model. Threads may share one; all methods wait."""

    def __init__(
        self, info: MediaInfo, processor: Callable[[], MediaProcessor], reader: MediaReader | None = None
    ) -> None:
        """`processor`: returns the model's; it is called when the first medium comes."""
        self.info = info
        self.reader = MediaReader(info) if reader is None else reader
        self._make = processor
        self._processor: MediaProcessor | None = None

    def process(
        self,
        prompt: str | Sequence[int],
        parts: Sequence[MediaPart],
        io_options: Mapping[str, Any] | None = None,
        processor_options: Mapping[str, Any] | None = None,
    ) -> ProcessedPrompt:
        """Returns the prompt's tokens and items.

        `io_options`, `processor_options`: media_io_kwargs and mm_processor_kwargs of the request, which go before the
        operator's. MediaError has the place of a part that cannot be used; ValueError is the prompt's.
        """
        self.reader.check_counts([part.kind for part in parts])
        media = self.reader.read(parts, io_options)
        if not isinstance(processor_options, Mapping | None) or len(processor_options or {}) > MAX_PROCESSOR_OPTIONS:
            raise ValueError(f"mm_processor_kwargs must be an object of at most {MAX_PROCESSOR_OPTIONS} entries")
        options = {**self.info.processor_options, **(processor_options or {})}
        if self._processor is None:
            self._processor = self._make()
        return self._processor.process(prompt, media, options)

    def close(self) -> None:
        """Ends the threads and processes that do nothing."""
        self.reader.close()
