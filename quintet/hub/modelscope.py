"""Models from ModelScope, by its own package, where QUINTET_USE_MODELSCOPE asks for it."""

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from quintet.common.distribution import install_hint
from quintet.config import EngineConfig

Patterns = tuple[list[str], list[str]]  # of the files that are wanted, and of those that are not


class ModelScopeRequest(NamedTuple):
    """A model there."""

    name: str
    revision: str | None


def download(request: ModelScopeRequest, config: EngineConfig, patterns: Patterns, offline: bool) -> Path:
    """The folder of a model with the files that match. OSError says why there is none, and what to do."""
    hub = _import_package("modelscope.hub.snapshot_download")
    with _list_modelscope_files(request):
        return Path(
            hub.snapshot_download(
                request.name,
                revision=request.revision,
                cache_dir=config.download_dir,
                allow_patterns=patterns[0],
                ignore_patterns=patterns[1],
                local_files_only=offline,
            )
        )


def list_files(request: ModelScopeRequest) -> list[str]:
    """The files of a model, by their paths."""
    api = _import_package("modelscope.hub.api").HubApi()
    with _list_modelscope_files(request):
        files = api.get_model_files(request.name, revision=request.revision, recursive=True)
        return sorted(each["Path"] for each in files if each["Type"] != "tree")


def _import_package(module: str) -> Any:
    if importlib.util.find_spec("modelscope") is None:
        raise ValueError(
            f"QUINTET_USE_MODELSCOPE is set, and the package modelscope is missing: {install_hint('modelscope')}"
        )
    return importlib.import_module(module)


@contextlib.contextmanager
def _list_modelscope_files(request: ModelScopeRequest) -> Iterator[None]:
    at = f" at revision {request.revision!r}" if request.revision else ""
    try:
        yield
    except Exception as error:  # its package raises kinds of its own
        why = " ".join(str(error).split())[:400] or type(error).__name__
        raise ConnectionError(
            f"cannot get {request.name!r}{at} from ModelScope: {why}; check the spelling and the network, give a local "
            "folder, or unset QUINTET_USE_MODELSCOPE"
        ) from error
