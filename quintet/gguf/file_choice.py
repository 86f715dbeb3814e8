"""Chooses one of a repository's GGUF files: by name, by quantization, or by default, as llama.cpp's -hf does."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quintet.gguf.file import SPLIT

PREFERRED = ("Q4_K_M", "Q8_0")  # where nothing is asked for; then the first
# Files that lie beside a model and are none: projectors, statistics, drafts.
MMPROJ = "mmproj"
BESIDE = re.compile(r"mmproj|imatrix|mtp-|eagle3-|dflash-|dspark-")
SHOWN = 40  # quantizations, or files, that an error lists
_LABEL = re.compile(r"[-._]((?:UD-)?(?:I?Q\d\w*|[BF]*F\d+|TQ\d\w*|MXFP4\w*|NVFP4\w*))$", re.IGNORECASE)
_QUERY = re.compile(r"[\w.-]{1,64}")


class GGUFQuery(NamedTuple):
    """A model's name, taken apart."""

    repository: str  # or a folder
    quantization: str | None = None  # of "repository:quantization"
    file: str | None = None  # of "owner/name/path/file.gguf", from the repository on


def parse_query(name: str) -> GGUFQuery:
    """Parses the name of a model that is no local folder or file."""
    if name.endswith(".gguf") and name.count("/") >= 2:
        owner, repository, file = name.split("/", 2)
        return GGUFQuery(f"{owner}/{repository}", file=file)
    repository, colon, quantization = name.rpartition(":")
    if repository and _QUERY.fullmatch(quantization):
        return GGUFQuery(repository, quantization)
    return GGUFQuery(name)


def choose(files: Iterable[str], wanted: GGUFQuery) -> list[str]:
    """The model's file, or all that it was split into, in their order. FileNotFoundError lists what there is."""
    there = sorted(each for each in files if each.endswith(".gguf"))
    models = [each for each in there if not BESIDE.search(_name(each)) and part_number(each) == 1]
    if not there:
        raise FileNotFoundError(f"{wanted.repository!r} holds no GGUF files; use its name alone")
    if wanted.file is not None:
        found = next((each for each in there if each == wanted.file), None)
        if found is None:
            raise FileNotFoundError(
                f"{wanted.repository!r} has no file {wanted.file!r}; it holds {_format_names(there)}"
            )
        return parts_of(found, there, wanted.repository)
    tags = PREFERRED if wanted.quantization is None else (wanted.quantization,)
    found = next((each for tag in tags for each in _of(tag, models)), None)
    if found is None and wanted.quantization is None:
        found = next(iter(models), None)
    if found is None:
        labels = list(dict.fromkeys(quantization_label(each) or each for each in models)) or there
        asked_for = f"GGUF model of {wanted.quantization!r}" if wanted.quantization else "GGUF model"
        raise FileNotFoundError(f"{wanted.repository!r} has no {asked_for}; it holds {_format_names(labels)}")
    return parts_of(found, there, wanted.repository)


def choose_mmproj(files: Iterable[str], model: str) -> str | None:
    """Returns the encoder of images that lies beside a model: in its folder, or else in one around it, that of the
    nearest number of bits."""
    folders = model.split("/")[:-1]

    def distance(file: str) -> tuple[int, int, str]:
        return len(folders) - file.count("/"), abs(_bits(file) - _bits(model)), file

    there = [each for each in files if MMPROJ in _name(each) and each.endswith(".gguf")]
    beside = [each for each in there if folders[: each.count("/")] == each.split("/")[:-1]]
    return min(beside, key=distance, default=None)


def _bits(file: str) -> int:
    """Returns the first number of a file's quantization, such as 4 of Q4_K_M; 0 where its name has none."""
    found = re.search(r"\d+", quantization_label(file) or "")
    return int(found[0]) if found else 0


def _of(tag: str, models: Sequence[str]) -> list[str]:
    """The models of a quantization: those that end in its name first, then those that have it anywhere."""
    exact = re.compile(rf"(?:^|[-._/]){re.escape(tag)}$", re.IGNORECASE)
    within = re.compile(rf"(?:^|[-._/]){re.escape(tag)}[-./]", re.IGNORECASE)
    return [each for each in models if exact.search(_stem(each))] + [each for each in models if within.search(each)]


def _name(file: str) -> str:
    return file.rpartition("/")[2]


def _stem(file: str) -> str:
    """Without the ending, and without the number of a part."""
    split = SPLIT.fullmatch(file)
    return split[1] if split else file.removesuffix(".gguf")


def quantization_label(file: str) -> str | None:
    """Returns the quantization that a file's name ends with, such as Q4_K_M."""
    found = _LABEL.search(_stem(file))
    return found[1] if found else None


def part_number(file: str) -> int:
    """Returns the number of a part of a split model; 1 of a whole one."""
    split = SPLIT.fullmatch(file)
    return int(split[2]) if split else 1


def parts_of(file: str, there: Sequence[str], repository: str) -> list[str]:
    """Returns a model's file, or all that it was split into. FileNotFoundError names the absent ones."""
    split = SPLIT.fullmatch(file)
    if split is None:
        return [file]
    names = [f"{split[1]}-{number:05}-of-{split[3]}.gguf" for number in range(1, int(split[3]) + 1)]
    absent = [each for each in names if each not in there]
    if absent or not names:
        raise FileNotFoundError(f"{repository!r} lacks {_format_names(absent)} of the {split[3]} files of the model")
    return names


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(each[:120] for each in names[:SHOWN]) + more
