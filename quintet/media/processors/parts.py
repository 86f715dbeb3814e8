"""Parts of a processor, one for each kind of media, whose results are recorded and given again."""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quintet.media.kinds import AUDIO, IMAGE, VIDEO
from quintet.media.processors.made import ProcessedMedia

ATTRIBUTES = {IMAGE: "image_processor", VIDEO: "video_processor", AUDIO: "feature_extractor"}  # kind -> of a processor
OTHER_ATTRIBUTES = {AUDIO: "audio_processor"}  # of some processors
ARGUMENTS = {IMAGE: "images", VIDEO: "videos", AUDIO: "audio"}  # kind -> of a call
COUNT = "batch_num_images"  # of MediaFamily.counts_pictures

MAX_FILLED = 512 * 2**20  # bytes of what a prompt's recordings take, filled up to the longest


class Fields(dict[str, Any]):
    """Fields of media by key and by attribute, as transformers' parts give them."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class RecordedPart:
    """A part of a processor whose results are kept, and may be given again in the place of a call."""

    def __init__(self, part: Any, axis: int, tensors: bool, filled: bool = False) -> None:
        """`axis`: of the arrays, along which media stand. `tensors`: the processor reads torch's, and no arrays.
        `filled`: arrays of several media are filled up to the longest, as the part does with recordings."""
        self._part, self._axis, self._tensors, self._filled = part, axis, tensors, filled
        self._replayed: Sequence[ProcessedMedia] = ()
        self.last: dict[str, Any] = {}  # what the last call gave

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, *media: Any, **options: Any) -> Any:
        if self._replayed:
            return self._again()
        out = self._part(*media, **{**options, "return_tensors": "pt" if self._tensors else "np"})
        self.last = dict(out)
        return out

    @contextlib.contextmanager
    def replaying(self, made: Sequence[ProcessedMedia]) -> Iterator[None]:
        """Within, a call gives the results of these media, one after another."""
        self._replayed = made
        try:
            yield
        finally:
            self._replayed = ()

    def _again(self) -> dict[str, Any]:
        fields = [{name: each.array() for name, each in made.fields.items()} for made in self._replayed]
        found = joined(_filled(fields) if self._filled else fields, self._axis)
        if self._tensors:
            import torch

            arrays = {name: each for name, each in found.items() if isinstance(each, np.ndarray)}
            found |= {name: torch.from_numpy(np.array(each)) for name, each in arrays.items()}
        facts = [copy.deepcopy(made.facts) for made in self._replayed]  # processors write into them
        return Fields(found | {name: [part for each in facts for part in each[name]] for name in facts[0]})


def joined(fields: Sequence[Mapping[str, NDArray[Any]]], axis: int) -> dict[str, Any]:
    """Returns the arrays of several media as one call would: where sizes differ, as lists."""
    found: dict[str, Any] = {}
    several = len(fields) > 1
    for name in dict.fromkeys(name for each in fields for name in each):  # a medium may lack some
        arrays = [each[name][:1] if several and COUNT in each else each[name] for each in fields if name in each]
        alike = len({(each.ndim, each.shape[:axis], each.shape[axis + 1 :]) for each in arrays}) == 1
        if alike and arrays[0].ndim > axis:
            found[name] = np.concatenate(arrays, axis)
        elif axis:
            found[name] = [[part for each in arrays for part in each[0]]]
        else:
            found[name] = [part for each in arrays for part in each]
    return {**found, COUNT: np.array([len(fields)])} if COUNT in found else found


def _filled(fields: Sequence[Mapping[str, NDArray[Any]]]) -> list[dict[str, NDArray[Any]]]:
    """Returns the arrays of several media, each with zeros up to the longest of every axis but the first."""
    found: list[dict[str, NDArray[Any]]] = [{} for _ in fields]
    if (whole := len(fields) * max(sum(each.nbytes for each in one.values()) for one in fields)) > MAX_FILLED:
        raise ValueError(
            f"the {len(fields)} recordings, each filled up to the longest, take {whole / 2**20:.0f} MiB, and "
            f"{MAX_FILLED // 2**20} are the most; give fewer, or shorter ones"
        )
    for name in fields[0]:
        sizes = [max(axis) for axis in zip(*(each[name].shape[1:] for each in fields), strict=True)]
        for each, made in zip(fields, found, strict=True):
            missing = [(0, most - size) for most, size in zip(sizes, each[name].shape[1:], strict=True)]
            made[name] = np.pad(each[name], [(0, 0), *missing])
    return found


def as_array(value: Any) -> NDArray[Any]:
    """Returns a field as an array, floats as float32: NumPy has no bfloat16."""
    array = np.asarray(value.float() if str(getattr(value, "dtype", "")) == "torch.bfloat16" else value)
    if array.dtype.hasobject:
        raise ValueError("a processor's arrays differ in size for one medium")
    return array.astype(np.float32) if array.dtype == np.float64 else array


def is_array(value: Any) -> bool:
    """True for numbers, in arrays, tensors or lists: not for a list of objects, such as the times of a video."""
    plain = (int, float, list)
    return not isinstance(value, list) or not value or isinstance(value[0], plain) or hasattr(value[0], "shape")


def with_own_parts(processor: Any) -> Any:
    """Returns transformers' class of a processor, for parts that need no torchvision, or are missing."""

    class WithParts(processor):
        """The same, for parts that were loaded here."""

        def check_argument_for_proper_class(self, name: str, part: Any) -> Any:
            unusual = part is None or name in (ATTRIBUTES[VIDEO], ATTRIBUTES[IMAGE])
            return type(part) if unusual else super().check_argument_for_proper_class(name, part)

    WithParts.__name__ = processor.__name__
    return WithParts
