"""Write a checkpoint with a LoRA adapter merged into its base model, which then needs no adapter."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("BASE", help="model that the adapter was trained on: a folder, hub id or 'bundled', in floats")
    parser.add_argument("ADAPTER", help="folder or hub id with adapter_config.json and adapter_model.safetensors")
    parser.add_argument("OUT", type=Path, help="the folder to write, which must not be there yet")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is in the folder already")


def run(arguments: argparse.Namespace) -> int:
    """Writes the folder and prints a line about it."""
    from quintet.quantize.lora.merge import merge_lora

    merged = merge_lora(arguments.BASE, arguments.ADAPTER, arguments.OUT, arguments.overwrite)
    replaced = f", {merged.replaced} tensors replaced" if merged.replaced else ""
    untied = ", the head no longer tied to the token embedding" if merged.untied else ""
    print(
        f"{merged.folder}: {merged.modules} modules merged{replaced}{untied}; {merged.num_bytes / 1e6:.1f} MB in "
        f"{merged.seconds:.1f} s"
    )
    return 0
