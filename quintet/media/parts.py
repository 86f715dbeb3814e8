"""Media as callers give them, before they are fetched and decoded."""

from dataclasses import dataclass, field
from typing import Any

from quintet.media.items import DecodedMedia

MAX_UUID = 256  # characters of a caller's name for a medium


@dataclass(frozen=True)
class MediaPart:
    """One picture, video or recording of a prompt. It has a URL, embeddings, or is decoded already."""

    kind: str  # IMAGE, VIDEO or AUDIO
    where: str  # its place in the request, for errors
    url: str = field(default="", repr=False)  # data:, file:, http: or https:
    embeds: Any = None  # rows that stand in the place of an encoder's output: base64 of a tensor, or an array
    media: DecodedMedia | None = None
    uuid: str = ""  # the caller's name for it
