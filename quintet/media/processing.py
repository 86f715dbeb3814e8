"""A model's processor, which is transformers' own: text and media become token ids, and arguments of the encoder.

The processor alone decides how many tokens a picture takes and which ones they are. Each picture is processed by
itself: its arrays do not depend on what else is in a prompt, so they are cached, and found again in the next one.
"""

import contextlib
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quintet.media.families import MediaModel
from quintet.media.items import IMAGE, DecodedMedia, MediaItem, ProcessedPrompt, WireArray

DIGEST_BYTES = 16
LONGEST = 300  # characters of a processor's error
COUNT = "batch_num_images"  # of MediaFamily.counts_pictures


@dataclass(frozen=True)
class ProcessedImage:
    """A picture as the processor makes it, whatever prompt it is in."""

    digest: bytes
    fields: dict[str, WireArray]  # all that the image processor gives
    token_ids: tuple[int, ...]  # in the place of the text's placeholder
    count: int  # those of them in whose places rows stand

    @property
    def nbytes(self) -> int:
        """Bytes in memory, of the arrays."""
        return sum(len(each.data) for each in self.fields.values())


class ImageCache:
    """Processed pictures by the digest of their content, up to so many bytes; those that were used last stay."""

    def __init__(self, most: int) -> None:
        self._most, self.nbytes, self._lock = most, 0, Lock()
        self._held: OrderedDict[bytes, ProcessedImage] = OrderedDict()

    def __len__(self) -> int:
        """Pictures that are held."""
        return len(self._held)

    def find(self, key: bytes) -> ProcessedImage | None:
        """Returns what is held under the key."""
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
            return found

    def put(self, key: bytes, image: ProcessedImage) -> None:
        """Holds a picture, unless it is larger than the cache."""
        with self._lock:
            if key in self._held or image.nbytes > self._most:
                return
            self._held[key] = image
            self.nbytes += image.nbytes
            while self.nbytes > self._most:
                self.nbytes -= self._held.popitem(last=False)[1].nbytes


class HFMediaProcessor:
    """MediaProcessor of a model, by transformers' processor. Any thread may call it; calls take turns."""

    def __init__(self, model: MediaModel, processor: Any) -> None:
        """`processor`: of load_processor(); it becomes part of this object."""
        self.model, self._processor, self._lock = model, processor, Lock()
        self._images = _OneByOne(processor.image_processor, int(model.family.nested))
        processor.image_processor = self._images
        self.cache = ImageCache(model.cache_bytes)
        self._text_token = _text_token(processor)
        self._text_id = int(processor.tokenizer.convert_tokens_to_ids(self._text_token))

    def process(
        self, prompt: str | Sequence[int], media: Sequence[DecodedMedia], options: Mapping[str, Any]
    ) -> ProcessedPrompt:
        """See MediaProcessor."""
        self._check(media)
        several = self.model.family.counts_pictures and len(media) > 1
        with self._lock:
            images = [self._image(each, options, several) for each in media]
            ids = self._expanded(prompt, images, options) if isinstance(prompt, str) else self._inserted(prompt, images)
        spans = self._spans(ids, images)
        items = [self._item(image, each) for image, each in zip(images, spans, strict=True)]
        self._check_rows(items)
        return ProcessedPrompt(ids, items)

    def _check(self, media: Sequence[DecodedMedia]) -> None:
        for each in media:
            if each.kind != IMAGE:
                raise ValueError(f"{each.kind} is not served for models of type {self.model.model_type}; give images")
        most = self.model.limits.get(IMAGE)
        if most is not None and len(media) > most:
            raise ValueError(
                f"the prompt has {len(media)} images, and limit_mm_per_prompt allows {most}; give fewer, or raise it"
            )

    def _check_rows(self, items: Sequence[MediaItem]) -> None:
        most, together = self.model.max_rows, self.model.max_prompt_rows
        largest, whole = max(each.count for each in items), sum(each.count for each in items)
        if largest > most > 0:
            raise ValueError(
                f"an image takes {largest} tokens, and the device has room for {most} (encoder_cache_rows); give a "
                f"smaller one, or start with encoder_cache_rows={largest} or more"
            )
        run = max(stop - first for each in items for first, stop in each.spans)
        if run > self.model.max_run > 0:
            raise ValueError(
                f"an image takes {run} tokens that see one another, and a step has {self.model.max_run} of them at "
                "most (max_num_batched_tokens, or the window of the model's layers); raise max_num_batched_tokens"
            )
        if whole > together > 0:
            raise ValueError(
                f"the prompt's images take {whole} tokens, and the device has room for {together} "
                "(encoder_cache_rows), where a step computes the whole prompt; raise encoder_cache_rows, or leave "
                "enable_chunked_prefill on"
            )

    def _image(self, media: DecodedMedia, options: Mapping[str, Any], several: bool) -> ProcessedImage:
        """Processes a picture by itself, or finds it."""
        key = _raw_digest(media, options, several)
        if (known := self.cache.find(key)) is not None:
            return known
        given = [_picture(media.data)] * (1 + several)  # of two equal ones, the first is read as one of several
        with _one_line_errors():
            ids = self._call(self._text_token * len(given), given, {**options, "add_special_tokens": False})
            fields = {name: WireArray.of(_array(value)) for name, value in self._images.last.items()}
        ids = ids[: len(ids) // len(given)]
        count = ids.count(self.model.placeholder_id)
        if not count:
            raise ValueError(
                f"the processor gives an image no token {self.model.placeholder_id} (image_token_id of config.json), "
                "which its rows would stand for; processor and model do not belong together"
            )
        digest = key if media.uuid else _digest(media.kind, self._arguments(fields))
        image = ProcessedImage(digest, fields, tuple(ids), count)
        self.cache.put(key, image)
        return image

    def _call(self, text: str, pictures: Sequence[Any], options: Mapping[str, Any]) -> list[int]:
        """Returns the token ids of text and pictures."""
        images = [list(pictures)] if self.model.family.counts_pictures else list(pictures)  # of one prompt
        out = self._processor(text=text, images=images, **{"return_tensors": None, **options})
        found = out["input_ids"]
        row = found[0] if len(found) and not isinstance(found[0], int) else found
        return [int(each) for each in row]

    def _expanded(self, text: str, images: Sequence[ProcessedImage], options: Mapping[str, Any]) -> list[int]:
        """Returns the tokens of a text with a placeholder for each picture."""
        self._check_count(text.count(self._text_token), len(images))
        begins = getattr(self._processor.tokenizer, "bos_token", None)
        adds = not (begins and text.startswith(begins))  # a rendered chat brings its special tokens itself
        replayed = [{name: each.array() for name, each in image.fields.items()} for image in images]
        with self._images.replaying(replayed), _one_line_errors():
            blank = _picture(np.zeros((8, 8, 3), np.uint8))  # the arrays of the pictures are there already
            return self._call(text, [blank] * len(images), {"add_special_tokens": adds, **options})

    def _inserted(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> list[int]:
        """Returns the tokens of a prompt of token ids, which has a placeholder for each picture, or all of its
        tokens."""
        rows = sum(image.count for image in images)
        if rows != len(images) and list(ids).count(self.model.placeholder_id) == rows:
            return list(ids)
        self._check_count(list(ids).count(self._text_id), len(images))
        found: list[int] = []
        left = iter(images)
        for each in ids:
            found += next(left).token_ids if each == self._text_id else (each,)
        return found

    def _check_count(self, there: int, wanted: int) -> None:
        if there != wanted:
            raise ValueError(
                f"the prompt has {there} placeholders {self._text_token!r} for {wanted} images; it takes one for each, "
                "in their order"
            )

    def _spans(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> list[tuple[tuple[int, int], ...]]:
        """Returns the runs of tokens of each picture."""
        places = [at for at, each in enumerate(ids) if each == self.model.placeholder_id]
        if len(places) != (rows := sum(image.count for image in images)):
            raise ValueError(
                f"the prompt has {len(places)} tokens for rows of images, and they have {rows}: its text holds such a "
                "token by itself; take it out"
            )
        found, first = [], 0
        for image in images:
            found.append(_runs(places[first : first + image.count]))
            first += image.count
        return found

    def _item(self, image: ProcessedImage, spans: tuple[tuple[int, int], ...]) -> MediaItem:
        return MediaItem(IMAGE, image.digest, self._arguments(image.fields), spans)

    def _arguments(self, fields: Mapping[str, WireArray]) -> dict[str, WireArray]:
        """Those of the fields that the encoder takes."""
        family = self.model.family
        names = (*family.fields, COUNT) if family.counts_pictures else family.fields
        return {name: fields[name] for name in names if name in fields}


class _OneByOne:
    """An image processor whose arrays are kept, and may be given again in the place of a call."""

    def __init__(self, processor: Any, axis: int) -> None:
        """`axis`: of the arrays, along which pictures stand."""
        self._processor, self._axis = processor, axis
        self._replayed: list[dict[str, NDArray[Any]]] = []
        self.last: dict[str, Any] = {}  # what the last call gave

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, images: Any, *args: Any, **options: Any) -> Any:
        if self._replayed:
            return _joined(self._replayed, self._axis)
        out = self._processor(images, *args, **{**options, "return_tensors": "np"})
        self.last = dict(out)
        return out

    @contextlib.contextmanager
    def replaying(self, fields: list[dict[str, NDArray[Any]]]) -> Iterator[None]:
        """Within, a call gives these arrays, picture after picture."""
        self._replayed = fields
        try:
            yield
        finally:
            self._replayed = []


def _joined(fields: Sequence[Mapping[str, NDArray[Any]]], axis: int) -> dict[str, Any]:
    """Returns the arrays of several pictures as one call would: where sizes differ, as lists."""
    found: dict[str, Any] = {}
    several = len(fields) > 1
    for name in fields[0]:
        arrays = [each[name][:1] if several and COUNT in each else each[name] for each in fields]
        alike = len({(each.ndim, each.shape[:axis], each.shape[axis + 1 :]) for each in arrays}) == 1
        if alike and arrays[0].ndim > axis:
            found[name] = np.concatenate(arrays, axis)
        elif axis:
            found[name] = [[part for each in arrays for part in each[0]]]
        else:
            found[name] = [part for each in arrays for part in each]
    return {**found, COUNT: np.array([len(fields)])} if COUNT in found else found


def _text_token(processor: Any) -> str:
    """Returns what stands for a picture in a text."""
    token = getattr(processor, "image_token", None)
    if token is None:
        raise ValueError(f"{type(processor).__name__} names no placeholder of images (image_token)")
    return str(getattr(token, "content", token))


def _picture(data: NDArray[Any]) -> Any:
    """uint8 [H, W, 3] -> Pillow's object, which says by itself where its channels are."""
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(data))


def _array(value: Any) -> NDArray[Any]:
    """Returns a field as an array, floats as float32."""
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise ValueError("an image processor's arrays differ in size for one image")
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _runs(places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Rising numbers -> [first, stop) of each run of them."""
    cuts = [at for at in range(1, len(places)) if places[at] != places[at - 1] + 1]
    bounds = zip([0, *cuts], [*cuts, len(places)], strict=True)
    return tuple((places[first], places[stop - 1] + 1) for first, stop in bounds)


def _digest(kind: str, fields: Mapping[str, WireArray]) -> bytes:
    """Returns the digest of what the encoder is given."""
    found = hashlib.blake2b(kind.encode(), digest_size=DIGEST_BYTES, person=b"quintet-media")
    for name, each in sorted(fields.items()):
        found.update(f"/{name}/{each.dtype}/{each.shape}/".encode())
        found.update(each.data)
    return found.digest()


def _raw_digest(media: DecodedMedia, options: Mapping[str, Any], several: bool) -> bytes:
    """Returns the digest of a picture as it was given, and of how it is processed."""
    settings = json.dumps([options, several], sort_keys=True, default=str).encode()
    found = hashlib.blake2b(settings, digest_size=DIGEST_BYTES, person=b"quintet-raw")
    if media.uuid:
        found.update(f"/{media.kind}/uuid/{media.uuid}".encode())
    else:
        found.update(f"/{media.kind}/{media.data.dtype}/{media.data.shape}/".encode())
        found.update(np.ascontiguousarray(media.data).data)
    return found.digest()


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Makes any exception of transformers' code a ValueError of one line."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # whatever a processor raises, in any version of it
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]
        raise ValueError(f"the model's processor refuses the prompt or an image ({reason})") from error
