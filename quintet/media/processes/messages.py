"""Orders for a processing process, and its answers."""

import msgspec

from quintet.media.families import MediaModel
from quintet.media.items import ProcessedPrompt, VideoTimes


class ProcessOrder(msgspec.Struct):
    """A prompt in the data, which begins with so many bytes of a PromptHead; arrays follow."""

    head: int


class GivenMedia(msgspec.Struct):
    """A decoded medium, whose array is in the data."""

    kind: str
    dtype: str
    shape: list[int]
    rate: float
    uuid: str
    times: VideoTimes | None = None


class PromptHead(msgspec.Struct):
    """A prompt without its arrays."""

    model: MediaModel  # the same in each order
    prompt: str | list[int]
    media: list[GivenMedia]
    options: dict[str, object]


class ProcessAnswer(msgspec.Struct):
    """The prompt is in the data (MessagePack), or it is refused."""

    size: int = 0
    error: str = ""
    failed: bool = False  # the processor itself cannot be used: no prompt would be taken


def encode_prompt(prompt: ProcessedPrompt) -> bytes:
    """Returns a processed prompt as bytes."""
    return msgspec.msgpack.encode(prompt)


def decode_prompt(data: bytes) -> ProcessedPrompt:
    """Returns the prompt of encode_prompt()."""
    return msgspec.msgpack.decode(data, type=ProcessedPrompt)
