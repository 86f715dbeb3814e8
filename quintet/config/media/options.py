"""Options of images, video and audio in prompts: how many, from where, and how they are decoded."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quintet.common.suggestions import refuse_unknown
from quintet.common.value_parsers import Parse, boolean, json_object, list_of, optional, text
from quintet.config.schema.fields import option
from quintet.media.kinds import KINDS

MAX_ITEMS = 10_000
# of vLLM's long form of a limit: sizes of an example that its memory is measured with, which changes nothing here
_EXAMPLE_SIZES = ("num_frames", "width", "height", "length")
_GROUP = "media"
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?|[0-9a-f:.]{2,45}")  # a name, or an address


def _limits(value: Any) -> dict[str, int]:
    """Most items by kind; vLLM takes {"image": {"count": 0}} too."""
    limits: dict[str, int] = {}
    given = json_object(value)
    _refuse_kinds(given)
    for kind, limit in given.items():
        if isinstance(limit, Mapping):
            refuse_unknown(f"entry of limit_mm_per_prompt.{kind}", limit, ("count", *_EXAMPLE_SIZES))
            limit = limit.get("count", MAX_ITEMS)
        if type(limit) is not int or not 0 <= limit <= MAX_ITEMS:
            raise ValueError(f"has {kind!r}: {limit!r}, and must have whole numbers from 0 to {MAX_ITEMS}")
        limits[kind] = limit
    return limits


def _io_options(value: Any) -> dict[str, dict[str, Any]]:
    given = json_object(value)
    _refuse_kinds(given)
    if wrong := next((kind for kind, each in given.items() if not isinstance(each, Mapping)), None):
        raise ValueError(f'has {wrong!r}: {given[wrong]!r}, and must have objects such as {{"num_frames": 16}}')
    return {kind: dict(each) for kind, each in given.items()}


def _refuse_kinds(given: Mapping[str, Any]) -> None:
    if wrong := next((kind for kind in given if kind not in KINDS), None):
        raise ValueError(f"has {wrong!r}, and its keys are {', '.join(KINDS)}")


def _domain(value: Any) -> str:
    """A host's name in lower case, as URLs have it."""
    name = text(value).strip().lower().removesuffix(".")
    try:
        name = name if ":" in name else name.encode("idna").decode()
    except UnicodeError:
        name = ""
    if _HOST.fullmatch(name):
        return name
    raise ValueError(f"must be names of hosts such as images.example.com, without https:// and port, not {value!r}")


def _domains(value: Any) -> tuple[str, ...]:
    """A list, its JSON text, or text with commas."""
    given = value
    if isinstance(value, str):
        given = [value]
    names: list[Any] = []
    for each in list_of(lambda entry: entry)(given):
        if isinstance(each, str) and each.strip().startswith("["):
            names += _json_list(each)
        elif isinstance(each, str):
            names += [part for part in each.split(",") if part.strip()]
        else:
            names.append(each)
    return tuple(_domain(each) for each in names)


def _json_list(words: str) -> list[Any]:
    try:
        found = json.loads(words)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise ValueError(f'must be names of hosts, or a JSON list such as ["example.com"], not {words[:200]!r}')
    return found


def _gigabytes(value: Any) -> float:
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 <= number <= 1e6:
        raise ValueError(f"must be GiB, a number from 0 to 1000000, not {value!r}")
    return number


_object: Parse = optional(json_object)


@dataclass(frozen=True)
class MediaOptions:
    """Images, video and audio of prompts; vLLM's names and defaults."""

    limit_mm_per_prompt: dict[str, int] | None = option(
        None, optional(_limits), 'most images, videos and recordings of a prompt, such as {"image": 4, "video": 0}; 0: '
        "none, and an encoder of no other kind is not loaded; 999 if not given", group=_GROUP,
    )  # fmt: skip
    mm_processor_kwargs: dict[str, Any] | None = option(
        None, _object, "options of the model's processor of media that a request does not set, such as "
        '{"max_pixels": 1003520}', group=_GROUP,
    )  # fmt: skip
    media_io_kwargs: dict[str, dict[str, Any]] | None = option(
        None, optional(_io_options), 'how media are decoded, by kind, such as {"video": {"num_frames": 16}}',
        group=_GROUP,
    )  # fmt: skip
    allowed_local_media_path: str | None = option(
        None, optional(text), "folder whose files requests may name by file:// URLs; none if not given", group=_GROUP,
        metavar="FOLDER",
    )  # fmt: skip
    allowed_media_domains: tuple[str, ...] = option(
        (), _domains, "host that http and https URLs of media may name; none if not given", group=_GROUP, nargs="+",
        metavar="HOST",
    )  # fmt: skip
    enable_mm_embeds: bool = option(
        False, boolean, "let a request bring what an encoder would give (image_embeds, audio_embeds)", group=_GROUP
    )
    mm_processor_cache_gb: float = option(
        4.0, _gigabytes, "memory of each process for media that the processor has made ready, in GiB; 0: none are kept",
        group=_GROUP, metavar="GB",
    )  # fmt: skip
