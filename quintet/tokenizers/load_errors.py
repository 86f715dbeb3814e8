"""Errors of tokenizers and of folders from which none can be loaded, in the words of this package."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from quintet.common.json_files import read_object


def one_line(error: BaseException) -> str:
    """Returns the error's text in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]


def load_error(folder: Path, error: Exception) -> str:
    """Returns why transformers loads no tokenizer from the folder, and what to do."""
    if not folder.is_dir():
        return f"cannot load the tokenizer of {str(folder)!r}, which is no folder here: {one_line(error)}"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            if (folder / name).exists():
                read_object(folder / name)
        except OSError as damage:
            return f"{folder / name} cannot be read: {damage}; fetch it again from the model's source"
        except ValueError as damage:
            return str(damage)
    if "trust_remote_code" in str(error):
        return (
            f"the tokenizer in {folder} is code of its own, and quintet runs none of tokenizers, trust_remote_code or "
            "not: it needs a tokenizer.json. Name a folder or a hub id that has one for this vocabulary (--tokenizer; "
            "conversions of the model to transformers' own classes often do), or save a fast tokenizer here"
        )
    if not (folder / "tokenizer.json").exists():
        return without_json(folder, one_line(error))
    return f"cannot load the tokenizer in {folder}: {one_line(error)}; fetch its files again from the model's source"


def without_json(folder: Path, why: str) -> str:
    """Returns the sentence for a folder whose older files could not be converted."""
    return (
        f"{folder} has no tokenizer.json, and what is there could not be converted ({why}); copy the file from the "
        "model's source, or have transformers write it: pip install sentencepiece tiktoken, then "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


@contextlib.contextmanager
def panic_as_value_error(what: str) -> Iterator[None]:
    """A panic in tokenizers, which is no Exception and would end more than the request, is a ValueError: a regular
    expression of tokenizer.json that gives up on a text, say."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise ValueError(
            f"the tokenizer cannot {what} ({one_line(error)}); give another, or mend the model's tokenizer.json"
        ) from None


def converters() -> list[str]:
    """Returns the installed packages that convert an older file to tokenizer.json."""
    return [name for name in ("sentencepiece", "tiktoken") if importlib.util.find_spec(name) is not None]
