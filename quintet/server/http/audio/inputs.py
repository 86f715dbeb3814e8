"""Reads requests of /v1/audio: forms with a file, or JSON with the audio as a data: URL, as batches have it."""

import asyncio
import base64
import binascii
import contextlib
import tempfile
from collections.abc import AsyncIterator
from typing import Any, BinaryIO, NamedTuple, TypeVar, get_args

import msgspec
from starlette.requests import Request as HttpRequest

from quintet.server.http.audio.protocol import SpeechBody
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.body import parse_body, read_body
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.inputs.uploads import Form, read_form
from quintet.transcription.segments import Thresholds
from quintet.transcription.transcriber import TranscriptionOptions

Body = TypeVar("Body", bound=SpeechBody)

_SAMPLING = (
    "seed", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_URLS = "the server fetches no addresses: give a data: URL, data:audio/wav;base64,..., or send the file in a form"


class SpeechRequest(NamedTuple):
    """Body of a request, and its file, which is closed when the reading block ends."""

    body: Any  # SpeechBody
    file: BinaryIO


@contextlib.asynccontextmanager
async def read_request(http: HttpRequest, model: type[Body]) -> AsyncIterator[SpeechRequest]:
    """Reads form or JSON. ApiError as read_form() and read_body() have it, and 400 for audio that is not there."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        body = await read_body(http, model)
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(_write_data_url, body.file_url, file)
            yield SpeechRequest(body, file)
        return
    async with read_form(http) as form:
        body = parse_body(_form_object(form, model), model)
        if body.file_url is not None:
            raise invalid_field("file_url", "belongs to JSON bodies; send the part file alone")
        yield SpeechRequest(body, form.file().content)


def _form_object(form: Form, model: type[SpeechBody]) -> dict[str, Any]:
    """Returns the fields of a form, whose values are all text, in the types of the model's fields."""
    found = form.values()
    for name, field in model.model_fields.items():
        kinds = get_args(field.annotation)
        value = found.get(name)
        if isinstance(value, list) and list not in map(_origin, kinds) and len(value) == 1:
            value = found[name] = value[0]
        if isinstance(value, str) and list in map(_origin, kinds):
            found[name] = [value]
        elif isinstance(value, str) and (bool in kinds or int in kinds or float in kinds):
            found[name] = _plain(value, kinds)
    return found


def _origin(kind: Any) -> Any:
    return getattr(kind, "__origin__", kind)


def _plain(text: str, kinds: tuple[Any, ...]) -> Any:
    """Returns a number or a truth value; the text itself where it is none, which the model then refuses."""
    if not text.strip():
        return None  # as browsers send fields that are left empty
    if bool in kinds:
        return _BOOLEANS.get(text.strip().lower(), text)
    try:
        return msgspec.json.decode(text.strip(), type=int if int in kinds else float)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text


def _write_data_url(url: str | None, file: BinaryIO) -> None:
    """Writes the audio of a data: URL. Source: RFC 2397."""
    if url is None:
        raise ApiError(
            400, "file is missing; send a form with the part 'file', or JSON with file_url", param="file",
            code="missing_field",
        )  # fmt: skip
    head, comma, data = url.partition(",")
    if not head.lower().startswith("data:") or not comma:
        raise invalid_field("file_url", f"is no data: URL; {_URLS}")
    if not head.lower().endswith(";base64"):
        raise invalid_field("file_url", f"is not in base64; {_URLS}")
    try:
        file.write(base64.b64decode(data, validate=True))
    except (binascii.Error, ValueError) as error:
        raise invalid_field("file_url", f"is damaged base64 ({error}); encode the file again") from None
    except OSError as error:
        raise ApiError(
            507, f"the server cannot keep the file ({error.strerror}); try again later", code="no_space"
        ) from None
    file.flush()
    file.seek(0)


def options_of(body: SpeechBody, task: str) -> TranscriptionOptions:
    """Returns the options of a request. ApiError 400 for what cannot be done."""
    shape = body.response_format or "json"
    words = "word" in (getattr(body, "timestamp_granularities", None) or ())
    if words and shape != "verbose_json":
        raise invalid_field(
            "timestamp_granularities", f"has 'word', and {shape} has no words; ask for response_format verbose_json"
        )
    if body.stream and shape not in ("json", "text"):
        raise invalid_field("response_format", f"{shape} is not streamed; set stream to false, or ask for json")
    if (target := (body.to_language or "").strip()) and not _serves(target, body, task):
        raise invalid_field(
            "to_language", "is English alone for translations, and the language that is spoken for transcriptions; "
            "leave it out",
        )  # fmt: skip
    thresholds = Thresholds(temperatures=(body.temperature,)) if body.temperature else Thresholds()
    sampling = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.max_completion_tokens is not None:
        sampling["max_tokens"] = body.max_completion_tokens
    return TranscriptionOptions(
        task, body.language or None, body.prompt or "", bool(body.condition_on_previous_text), words, thresholds,
        sampling,
    )  # fmt: skip


def _serves(target: str, body: SpeechBody, task: str) -> bool:
    if task == "translate":
        return target.lower() in ("en", "english")
    return body.language is not None and target.lower() == body.language.strip().lower()
