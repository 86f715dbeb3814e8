"""Prompts that are an image by themselves, for models that embed texts and images by a tower each."""

from collections.abc import Mapping, Sequence
from typing import Any

from quintet.media.families import MediaModel
from quintet.media.items import IMAGE, DecodedMedia, MediaItem, ProcessedPrompt, WireArray
from quintet.media.processors.given import processor_input
from quintet.media.processors.made import MediaCache, ProcessedMedia, fields_digest, raw_digest
from quintet.media.processors.parts import as_array


class ImagePromptProcessor:
    """MediaProcessor of a model, by transformers' image processor. Any thread may call it."""

    def __init__(self, model: MediaModel, image_processor: Any) -> None:
        self.model, self._process, self.cache = model, image_processor, MediaCache(model.cache_bytes)

    def process(
        self, prompt: str | Sequence[int], media: Sequence[DecodedMedia], options: Mapping[str, Any]
    ) -> ProcessedPrompt:
        """See MediaProcessor. ValueError if there is a text, or another image."""
        if len(media) != 1 or media[0].is_rows or (prompt.strip() if isinstance(prompt, str) else prompt):
            raise ValueError(
                "this model embeds a text, or one image with an empty text, and not both together; send them apart"
            )
        made = self._made(media[0], options)
        item = MediaItem(made.kind, made.digest, made.fields, ((0, 1),))
        return ProcessedPrompt([self.model.tokens[IMAGE]], [item])

    def _made(self, media: DecodedMedia, options: Mapping[str, Any]) -> ProcessedMedia:
        """Processes an image, or finds it."""
        key = raw_digest(media, options, False)
        if (known := self.cache.find(key)) is not None:
            return known
        facts = self.model.family.kinds[IMAGE]
        try:
            out = self._process(processor_input(media, None, facts), return_tensors="np", **options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the model's processor refuses the image ({error})") from error
        fields = {name: WireArray.of(as_array(out[name])) for name in facts.fields if name in out}
        digest = key if media.uuid else fields_digest(IMAGE, fields)
        made = ProcessedMedia(IMAGE, digest, fields, (), 1)
        self.cache.put(key, made)
        return made
