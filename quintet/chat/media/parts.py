"""Parts of messages that are images, video or audio, in OpenAI's and vLLM's forms."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from quintet.common.suggestions import refuse_unknown
from quintet.common.unknown_fields import drop_unknown
from quintet.media.info import MediaInfo
from quintet.media.items import AUDIO, IMAGE, VIDEO
from quintet.media.parts import MAX_UUID, MediaPart
from quintet.sampling_params import ParameterError

MAX_PARTS = 10_000  # media of one conversation
DETAILS = ("auto", "low", "high", "original")  # OpenAI's; the model's processor decides, as in vLLM
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "webm", "mp4", "mpga", "mpeg")
MEDIA_TYPES = {  # types of parts -> kinds of media
    "image_url": IMAGE, "image_pil": IMAGE, "image_embeds": IMAGE, "video_url": VIDEO, "audio_url": AUDIO,
    "input_audio": AUDIO, "audio_embeds": AUDIO,
}  # fmt: skip
NO_MEDIA = (
    "this model takes text alone (or its encoder was not loaded: --limit-mm-per-prompt, --language-model-only); leave "
    "the part out, or choose a model that takes images, video or audio"
)
_SHARED_KEYS = ("type", "uuid", "cache_control", "prompt_cache_breakpoint")
_INVALID = "invalid_value"  # code of errors
_NO_ROLES = ("system", "developer")


class MediaCollector:
    """Media of one conversation, in the order of its messages."""

    def __init__(self, info: MediaInfo | None = None) -> None:
        """`info`: None for a model that takes text alone."""
        self.info = MediaInfo() if info is None else info
        self.parts: list[MediaPart] = []

    def add(self, part: Any, role: str, where: str) -> str:
        """Reads a part and keeps its medium -> its kind. ParameterError says what is wrong with it."""
        kind = part.kind if isinstance(part, MediaPart) else MEDIA_TYPES[part["type"]]
        where = part.where if isinstance(part, MediaPart) else where
        if kind not in self.info.kinds:
            raise ParameterError(where, f"is of the kind {kind}, which is not served: {self._lacks()}")
        if role in _NO_ROLES:
            raise ParameterError(where, f"is in a message of the {role}; put it into one of the user", _INVALID)
        if len(self.parts) >= MAX_PARTS:
            raise ParameterError(where, f"is beyond {MAX_PARTS} media of one conversation; send fewer", _INVALID)
        self.parts.append(part if isinstance(part, MediaPart) else read_part(part, where))
        return kind

    def placeholder(self, kind: str, where: str) -> str:
        """Returns the text that stands for an item, for chat templates that take text alone. ParameterError if the
        model has none."""
        if (text := self.info.placeholders.get(kind)) is not None:
            return text
        raise ParameterError(
            where, f"is of the kind {kind}, and this chat template takes text alone; give a chat_template that writes "
            'parts such as {"type": "image"}, or leave the part out', _INVALID,
        )  # fmt: skip

    def _lacks(self) -> str:
        taken = ", ".join(self.info.kinds)
        return f"this model takes text and {taken}; leave the part out" if taken else NO_MEDIA


def is_media(part: Any) -> bool:
    """True for a part that is an image, video or audio."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(part, MediaPart) or (isinstance(kind, str) and kind in MEDIA_TYPES)


def read_part(part: Mapping[str, Any], where: str) -> MediaPart:
    """Returns the medium of a part whose type is among MEDIA_TYPES. ParameterError has the place and the reason.

    Its uuid is checked and not used: another caller may give the same name to another medium.
    """
    kind = str(part["type"])
    known = (*_SHARED_KEYS, kind)
    _refuse_keys(part, known, where)
    uuid = part.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or len(uuid) > MAX_UUID):
        raise ParameterError(f"{where}.uuid", f"must be text of up to {MAX_UUID} characters", _INVALID)
    if part.get(kind) is None:
        what = " (media are not kept by their uuid alone)" if uuid else ""
        raise ParameterError(f"{where}.{kind}", f"is missing{what}; give it", _INVALID)
    return _READERS[kind](MEDIA_TYPES[kind], part[kind], where)


def _refuse_keys(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuses unknown keys, unless such are gathered."""
    if wrong := drop_unknown(dict(given), known, where):
        refuse_unknown(f"key of {where}", map(str, wrong), known)


def _read_url(kind: str, given: Any, where: str) -> MediaPart:
    """A URL as text, or as {"url": ..., "detail": ...}."""
    name = f"{where}.{kind}_url"
    detail = None
    if isinstance(given, Mapping):
        _refuse_keys(given, ("url", "detail", "media_type", "format"), name)
        given, detail = given.get("url"), given.get("detail")
    if not isinstance(given, str) or not given:
        raise ParameterError(
            name, 'must be an object with a url, such as {"url": "data:image/png;base64,..."}', _INVALID
        )
    if detail not in (None, *DETAILS):
        raise ParameterError(
            f"{name}.detail", f"must be one of {', '.join(DETAILS)}, not {str(detail)[:80]!r}", _INVALID
        )
    return MediaPart(kind, where, given)


def _not_among(where: str, given: Any, known: Collection[str]) -> ParameterError:
    return ParameterError(where, f"must be one of {', '.join(known)}, not {str(given)[:80]!r}", _INVALID)


def _read_audio(kind: str, given: Any, where: str) -> MediaPart:
    name = f"{where}.input_audio"
    data = given.get("data") if isinstance(given, Mapping) else None
    if not isinstance(data, str) or not data:
        raise ParameterError(name, 'must be an object such as {"data": base64, "format": "wav"}', _INVALID)
    _refuse_keys(given, ("data", "format"), name)
    form = given.get("format", "wav")
    if form not in AUDIO_FORMATS:
        raise ParameterError(
            f"{name}.format", f"must be one of {', '.join(AUDIO_FORMATS)}, not {str(form)[:80]!r}", _INVALID
        )
    url = data if data.startswith("data:") else f"data:audio/{form};base64,{data}"
    return MediaPart(kind, where, url)


def _read_embeds(kind: str, given: Any, where: str) -> MediaPart:
    return MediaPart(kind, where, embeds=given)


def _read_pil(kind: str, given: Any, where: str) -> MediaPart:
    """A Pillow image of a Python caller."""
    if isinstance(given, (str, Mapping, list, int, float)):
        raise ParameterError(
            f"{where}.image_pil", "is for Pillow images of Python programs (LLM.chat); send image_url", _INVALID
        )
    from quintet.media.arrays import image_part  # Pillow is there where its images are
    from quintet.media.errors import MediaError

    try:
        return image_part(given, where)
    except MediaError as error:
        raise media_error(error, where) from None


_READERS: dict[str, Callable[[str, Any, str], MediaPart]] = {
    **dict.fromkeys(("image_url", "video_url", "audio_url"), _read_url),
    **dict.fromkeys(("image_embeds", "audio_embeds"), _read_embeds),
    "input_audio": _read_audio,
    "image_pil": _read_pil,
}


def media_error(error: ValueError, where: str) -> ParameterError:
    """Returns a MediaError as the error of its place in the request; `where`: that of one without a place."""
    return ParameterError(getattr(error, "where", "") or where, f"cannot be used: {error}", "invalid_media")
