"""Packages that read weights in their own way, where they are installed: runai-model-streamer and its like."""

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from quintet.common.distribution import install_hint
from quintet.model_loader.sharded_state import SHARDS

STORE_SCHEMES = ("s3://", "gs://")  # addresses that Run:ai's streamer fetches from
STREAMER_FORMATS = ("runai_streamer", "runai_streamer_sharded")  # load_formats that it reads


class LoaderPackage(NamedTuple):
    """Package that reads a load_format."""

    module: str
    distribution: str
    extra: str  # of quintet's
    pattern: str = "*.safetensors"  # of the files


PACKAGES: Mapping[str, LoaderPackage] = {
    "runai_streamer": LoaderPackage("runai_model_streamer", "runai-model-streamer", "runai"),
    "runai_streamer_sharded": LoaderPackage("runai_model_streamer", "runai-model-streamer", "runai", SHARDS),
    "fastsafetensors": LoaderPackage("fastsafetensors", "fastsafetensors", "fastsafetensors"),
    "tensorizer": LoaderPackage("tensorizer", "tensorizer", "tensorizer", "*.tensors"),
}


def reader(load_format: str) -> Callable[[Path], dict[str, Tensor]]:
    """Reads all of a file into memory. ValueError where the package is not installed, or cannot read the file."""
    module, read = _import_package(load_format), _READ[load_format]

    def whole(file: Path) -> dict[str, Tensor]:
        try:
            return read(module, str(file))
        except Exception as error:  # each raises kinds of its own
            why = " ".join(str(error).split())[:400] or type(error).__name__
            raise ValueError(f"{file} cannot be read by {PACKAGES[load_format].distribution} ({why})") from error

    return whole


def write_tensorizer(tensors: Mapping[str, Tensor], file: Path) -> None:
    """A file that load_format="tensorizer" reads. ValueError where tensorizer is not installed."""
    serializer = _import_package("tensorizer").TensorSerializer(str(file))
    serializer.write_state_dict(dict(tensors))
    serializer.close()


def fetch(address: str, folder: Path, patterns: Iterable[str]) -> None:
    """Files of a store that match, into a folder. OSError says why there are none, and what to do."""
    streamer = _import_package("runai_streamer")
    kind = address.partition(":")[0].replace("gs", "gcs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        streamer.pull_files(address, str(folder), allow_pattern=list(patterns))
    except ImportError:
        raise OSError(f"{address} needs a package more: pip install 'runai-model-streamer[{kind}]'") from None
    except Exception as error:  # each store's client raises kinds of its own
        why = " ".join(str(error).split())[:400] or type(error).__name__
        raise ConnectionError(
            f"{address} cannot be fetched ({why}); check the address, and the credentials that its client reads from "
            "the environment"
        ) from error


def _import_package(load_format: str) -> Any:
    package = PACKAGES[load_format]
    if importlib.util.find_spec(package.module) is None:
        raise ValueError(
            f"load_format={load_format!r} needs the package {package.distribution}: {install_hint(package.extra)}"
        )
    return importlib.import_module(package.module)


def _read_runai(module: Any, file: str) -> dict[str, Tensor]:
    with module.SafetensorsStreamer() as streamer:
        streamer.stream_files([file])
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}  # the streamer reuses its memory


def _read_fastsafetensors(module: Any, file: str) -> dict[str, Tensor]:
    with module.fastsafe_open([file], nogds=True) as opened:
        return {name: opened.get_tensor(name).clone() for name in opened.keys()}


def _read_tensorizer(module: Any, file: str) -> dict[str, Tensor]:
    on_host = str(Tensor().device)
    with module.TensorDeserializer(file, device=on_host) as opened:
        return {name: opened[name].clone() for name in opened}


_READ = {
    **dict.fromkeys(STREAMER_FORMATS, _read_runai),
    "fastsafetensors": _read_fastsafetensors,
    "tensorizer": _read_tensorizer,
}
