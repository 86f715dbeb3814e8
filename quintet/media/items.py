"""Media of a request: as decoded, and as a model's processor makes them ready for its encoder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from quintet.media.kinds import AUDIO as AUDIO
from quintet.media.kinds import IMAGE as IMAGE
from quintet.media.kinds import VIDEO as VIDEO
from quintet.media.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class VideoTimes:
    """Times of a video's frames, by their numbers in its file. Encodes with msgspec."""

    frames: tuple[int, ...]  # numbers of those that were taken, rising
    total: int  # frames of the file
    rate: float  # frames a second of the file; 0: unknown

    @property
    def sampled_rate(self) -> float:
        """Frames that were taken of each second."""
        return self.rate * len(self.frames) / self.total


@dataclass(frozen=True)
class DecodedMedia:
    """One picture, video or recording that a caller gave, decoded."""

    kind: str  # IMAGE, VIDEO or AUDIO
    data: NDArray[Any]  # IMAGE uint8 [H, W, 3]; VIDEO uint8 [frames, H, W, 3]; AUDIO float32 [samples], mono
    rate: float = 0.0  # AUDIO: samples a second; VIDEO: frames a second of `data`
    uuid: str = ""  # the caller's name for it, which stands for its content; "": the content speaks
    times: VideoTimes | None = None  # VIDEO: None: `data` is all of it, at `rate`
    is_rows: bool = False  # `data` is what an encoder would give, float32 [rows, H] (image_embeds, audio_embeds)


ROWS = "*rows"  # field of an item that an encoder need not see: its rows; no processor has one of this name


@dataclass(frozen=True)
class WireArray:
    """An array as processes send it. Encodes with msgspec."""

    dtype: str  # NumPy's name, such as float32
    shape: tuple[int, ...]
    data: bytes  # in C order

    @classmethod
    def of(cls, array: NDArray[Any]) -> WireArray:
        """Returns the array as bytes."""
        return cls(array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes())

    def array(self) -> NDArray[Any]:
        """Returns the array, read-only. ValueError if the bytes are not as many as its shape says."""
        dtype = np.dtype(self.dtype)
        if dtype.hasobject or len(self.data) != math.prod(self.shape) * dtype.itemsize:
            raise ValueError(f"{len(self.data)} bytes are no {self.dtype} array of shape {self.shape}")
        return np.frombuffer(self.data, dtype).reshape(self.shape)


@dataclass(frozen=True)
class MediaItem:
    """One picture, video or recording, ready for the encoder. Encodes with msgspec."""

    kind: str
    digest: bytes  # 16 bytes, of kind and fields: items with equal digests are encoded alike
    fields: dict[str, WireArray] = field(default_factory=dict)  # arguments of the encoder, of this item alone
    # [first, stop) of each run of the prompt's tokens in whose places the encoder's rows stand, in the rows' order
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """Rows of the encoder's output, and tokens in their places."""
        return sum(stop - first for first, stop in self.spans)

    @property
    def attends_ahead(self) -> bool:
        """True if tokens side by side see one another, where a family's do: those of pictures and of frames."""
        return self.kind != AUDIO


@dataclass(frozen=True)
class ProcessedPrompt:
    """A prompt with media, as the model's processor makes it."""

    token_ids: list[int]  # placeholders of media included
    items: list[MediaItem]  # in the order of their tokens


class MediaProcessor(Protocol):
    """Makes prompts with media ready for a model."""

    def process(
        self, prompt: str | Sequence[int], media: Sequence[DecodedMedia], options: Mapping[str, Any]
    ) -> ProcessedPrompt:
        """Returns the prompt's tokens and its media, in the order in which its placeholders name them.

        `options`: mm_processor_kwargs. ValueError if the prompt's placeholders and the media do not agree, or if the
        processor refuses a medium.
        """
