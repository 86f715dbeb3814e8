"""Writes a checkpoint with a LoRA adapter merged into its weights, tensor by tensor."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from quintet.common.json_files import read_object
from quintet.config import EngineConfig
from quintet.hub.adapters import resolve_adapter
from quintet.hub.hf_overrides import QUANTIZATION_ENTRIES
from quintet.hub.resolve import load_model_config, resolve_model
from quintet.lora.adapter import AdapterError, LoRABounds, read_adapter
from quintet.lora.peft_config import read_peft_config
from quintet.model_loader.weight_files import DTYPES, WeightFiles
from quintet.quantize.lora.plan import BaseTensor, MergePlan, plan_merge
from quintet.quantize.writer import CheckpointShards, CheckpointWriter, copy_rest, write_json

# An adapter is merged once, by who has its files: only what no adapter has is refused.
BOUNDS = LoRABounds(max_rank=2**16, max_bytes=2**38, max_tensors=2**20)
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template.*")


@dataclass(frozen=True)
class MergeResult:
    """Result of merging an adapter."""

    folder: Path
    modules: int  # whose weights changed by LoRA
    replaced: int  # whole tensors of the adapter
    untied: bool  # the head is no longer the token embedding
    num_bytes: int
    seconds: float


@torch.inference_mode()
def merge_lora(
    base: str, adapter: Path | str, output: Path, overwrite: bool = False, progress: bool = True
) -> MergeResult:
    """Writes the folder `output`: weights in the base's types, in safetensors, config.json and tokenizer.

    `base` is a folder, a hub id or "bundled", in floats; `adapter` is a folder or a hub id. ValueError (AdapterError
    where it is about the adapter) or OSError says what cannot be merged; the folder appears when it is whole. At most a
    file of 4 GiB is held in memory, and the adapter.
    """
    began = time.monotonic()
    with CheckpointWriter(output, overwrite) as writer:
        place = resolve_adapter(str(adapter), EngineConfig(base))
        folder, config = _base(base)
        weights = WeightFiles(folder)
        tensors = _tensors(weights)
        lora, settings = read_adapter(place, BOUNDS), read_peft_config(place)
        writer.refuse_overlap(folder)
        plan = plan_merge(place, (lora, settings), tensors, _facts(config))
        writer.check_space(sum(file.stat().st_size for file in weights.files()) + lora.nbytes)
        shards = CheckpointShards(writer.folder)
        untied = _write(weights, plan, place, shards, progress)
        shards.finish()
        copy_rest(folder, writer.folder)
        if plan.rows:
            _copy_tokenizer(place, writer.folder)
        write_json(writer.folder / "config.json", _config(read_object(folder / "config.json"), plan, untied))
        written = writer.finish()
    replaced = len(lora.saved) - len(lora.base_copies)
    return MergeResult(written, len(lora.modules), replaced, untied, shards.num_bytes, time.monotonic() - began)


def _base(name: str) -> tuple[Path, Any]:
    """Folder of the base model, and its configuration as transformers reads it."""
    folder = resolve_model(EngineConfig(name))
    if folder.is_file():
        raise ValueError(f"{name!r} is a GGUF file; give the original, a folder of safetensors")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds no safetensors; load it with transformers and save it again")
    config = load_model_config(folder, pooling=True)
    if any(getattr(each, entry, None) for each in (config, config.get_text_config()) for entry in QUANTIZATION_ENTRIES):
        raise ValueError(
            f"{name!r} is quantized, and weights that are rounded cannot take an adapter's small changes; give the "
            "original in floats, merge, and quantize the result (quintet quantize)"
        )
    return folder, config


def _facts(config: Any) -> tuple[str, bool]:
    """Model type, and whether the head is the token embedding by the configuration."""
    both = (config, config.get_text_config())
    return str(config.model_type), any(getattr(each, "tie_word_embeddings", False) for each in both)


def _tensors(weights: WeightFiles) -> dict[str, BaseTensor]:
    tensors = {}
    for _, handle in weights.open_files():
        for name in handle.keys():
            header = handle.get_slice(name)
            tensors[name] = BaseTensor(tuple(header.get_shape()), DTYPES.get(header.get_dtype()))
    return tensors


def _write(weights: WeightFiles, plan: MergePlan, adapter: Path, shards: CheckpointShards, progress: bool) -> bool:
    """Adds all tensors of the new checkpoint; returns whether a head that was the token embedding is one by itself."""
    pair: dict[str, Tensor] = {}  # token embedding and head, where they are one weight and either changes
    with tqdm(total=plan.num_tensors, desc="Merging", unit="tensor", disable=not progress, mininterval=0.5) as bar:
        for _, handle in weights.open_files():
            for name in handle.keys():
                tensor = handle.get_tensor(name)
                merged = _checked(plan.apply(name, tensor), name, adapter)
                if plan.tied is None or name not in plan.tied:
                    shards.add({name: merged})
                else:
                    pair |= {name: merged}
                    if name == plan.tied.embedding and not plan.tied.stored:
                        pair[plan.tied.head] = _checked(plan.apply(plan.tied.head, tensor), plan.tied.head, adapter)
                bar.update()
    if plan.tied is None:
        return False
    embedding = pair[plan.tied.embedding]
    head = embedding if plan.tied.follows else pair[plan.tied.head]
    untied = not torch.equal(embedding, head)
    shards.add({plan.tied.embedding: embedding})
    if untied or plan.tied.stored:
        shards.add({plan.tied.head: head.clone()})
    return untied


def _checked(tensor: Tensor, name: str, adapter: Path) -> Tensor:
    if tensor.is_floating_point() and tensor.itemsize > 1 and not torch.isfinite(tensor).all():
        raise AdapterError(
            adapter, f"merged, the tensor {name!r} holds NaN or numbers beyond {tensor.dtype}; save the base model in "
            "bfloat16 or float32, or train the adapter again",
        )  # fmt: skip
    return tensor


def _config(content: Mapping[str, Any], plan: MergePlan, untied: bool) -> dict[str, Any]:
    """The base's config.json, with another vocabulary size or a head by itself where the adapter has that."""
    changed = dict(content)
    if isinstance(content.get("text_config"), dict):
        changed["text_config"] = _config(content["text_config"], plan, untied)
    if untied:
        changed["tie_word_embeddings"] = False
    if plan.rows and changed.get("vocab_size") in plan.rows:
        changed["vocab_size"] = plan.rows[changed["vocab_size"]]
    return changed


def _copy_tokenizer(adapter: Path, folder: Path) -> None:
    """An adapter with more tokens has its tokenizer beside it."""
    for pattern in _TOKENIZER:
        for file in adapter.glob(pattern):
            if file.is_file():
                (folder / file.name).write_bytes(file.read_bytes())
