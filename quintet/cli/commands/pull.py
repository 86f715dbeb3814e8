"""Download a model of the hub, or one quantization of its GGUF files, with progress; `run` and `serve` find it then."""

import argparse
from pathlib import Path

from quintet.cli.commands import _engine as engine
from quintet.cli.commands import _model_folders as places
from quintet.cli.tables import byte_size
from quintet.config import INSIDE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("MODEL", help="OWNER/NAME, or OWNER/NAME:QUANTIZATION such as Qwen/Qwen3-0.6B-GGUF:Q8_0")
    places.add_cache_arguments(parser, "revision", "hf_token", "ignore_patterns", "load_format")


def run(arguments: argparse.Namespace) -> int:
    """Prints the path and its size."""
    config = engine.config(engine.engine_settings(arguments))

    from quintet.hub.model_names import is_local
    from quintet.hub.resolve import resolve_model

    path = resolve_model(config)
    if config.model in INSIDE or is_local(config.model):
        print(f"{config.model} is on this machine: {path}")
        return 0
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    print(f"{config.model}: {byte_size(sum(_sizes(files)))} in {path}")
    return 0


def _sizes(files: list[Path]) -> list[int]:
    from quintet.hub.local_models import split_parts

    if len(files) == 1:  # a GGUF file, perhaps the first of several
        files = [files[0].with_name(each) for each in split_parts(files[0].name, map(str, _names(files[0])))]
    return [each.stat().st_size for each in files]


def _names(file: Path) -> list[str]:
    return [each.name for each in file.parent.iterdir()]
