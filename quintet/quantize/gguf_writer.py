"""A model as a GGUF file, written by the package gguf: names, metadata, and types tensor by tensor."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from quintet.hub.resolve import load_generation_config
from quintet.quantize import ggml_blocks as ggml
from quintet.quantize import gguf_tokenizer as gguf_tokens
from quintet.quantize.checkpoint import SourceCheckpoint
from quintet.quantize.gguf_presets import Preset
from quintet.quantize.schemes import Entries
from quintet.tokenizers.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}  # of gguf.MODEL_ARCH
TURNED = ("LLAMA",)  # architectures that rotate neighbouring rows of q and k


def write(original: SourceCheckpoint, preset: Preset, file: Path, name: str, progress: bool) -> tuple[int, int]:
    """-> how many matrices got the preset's type, and how many another. ValueError for a model that is not written."""
    gguf = library()
    config, kind = original.config, original.config.model_type
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"models of type {kind} are not written to GGUF here; {', '.join(sorted(ARCHITECTURES))} are. "
            "compressed-tensors' schemes, such as W4A16, are for every family"
        )
    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[kind])
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=False)
    _describe(writer, original, preset, name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    plan: list[tuple[str, str, str]] = []
    for own in original.entries:
        known = names.get_name(own, try_suffixes=(".weight", ".bias"))
        if known is None or (known.startswith("output.") and original.tied):
            continue
        shape = original.entries[own].shape
        held = preset.type_of(known, shape, original.tied, config.num_hidden_layers)
        plan.append((own, known, held))
        _announce(writer, known, shape, getattr(gguf.GGMLQuantizationType, held))
    if (divisors := _divisors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if divisors is not None:
        plan.append(("", "rope_freqs.weight", "F32"))
    turned = ARCHITECTURES[kind] in TURNED
    for own, known, held in tqdm(plan, desc="Quantizing", unit="tensor", disable=not progress, mininterval=0.5):
        tensor = divisors if not own and divisors is not None else original.read(own)
        tensor = _permuted(known, tensor, config) if turned else tensor
        writer.write_tensor_data(blocks(gguf, tensor, held))
    writer.close()
    same = sum(held == preset.type for _, _, held in plan)
    matrices = sum(bool(own) and len(original.entries[own].shape) > 1 for own, _, _ in plan)
    return same, matrices - same


def library() -> Any:
    """The package gguf; ValueError says how to get it."""
    try:
        import gguf
    except ImportError:
        raise ValueError(
            "GGUF files are written with the package gguf, which is not installed: pip install gguf"
        ) from None
    return gguf


def blocks(gguf: Any, tensor: Tensor, held: str) -> Any:
    """A tensor's bytes, as an array of numpy."""
    if held == "F32":
        return tensor.float().numpy()
    if held in ggml.KINDS:
        return ggml.encoded(tensor, held).numpy()
    return gguf.quants.quantize(tensor.float().numpy(), getattr(gguf.GGMLQuantizationType, held))


def _announce(writer: Any, name: str, shape: tuple[int, ...], kind: Any) -> None:
    """In the header: before a value is encoded, so that none but the one that is written is in memory."""
    import numpy as np
    from gguf.quants import quant_shape_to_byte_shape

    if kind.name in ("F32", "F16"):
        dtype = np.dtype(np.float32 if kind.name == "F32" else np.float16)
        writer.add_tensor_info(name, shape, dtype, math.prod(shape) * dtype.itemsize)
        return
    stored = quant_shape_to_byte_shape(shape, kind)
    writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), raw_dtype=kind)


def _permuted(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Rows of q and k in the order of neighbours: features i and i + half of a head stand side by side."""
    part = name.split(".")[-2]
    if part not in ("attn_q", "attn_k"):
        return tensor
    heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _describe(writer: Any, original: SourceCheckpoint, preset: Preset, name: str) -> None:
    import gguf

    config = original.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_file_type(getattr(gguf.LlamaFileType, preset.file_type))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _rotations(writer, config.rope_parameters or {})
    _window(writer, config)
    _tokenizer(writer, original)


def _rotations(writer: Any, rope: Mapping[str, Any]) -> None:
    import gguf

    kind = rope.get("rope_type", "default")
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if kind in ("default", "llama3"):  # the latter's divisors are a tensor
        return
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rotary positions of type {kind!r} are not written to GGUF here; linear, yarn and llama3 are")
    writer.add_rope_scaling_type(getattr(gguf.RopeScalingType, kind.upper()))
    writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        _yarn(writer, rope)


def _yarn(writer: Any, rope: Mapping[str, Any]) -> None:
    """Writes YaRN's fields; those that are missing have the same default in GGUF."""
    if not rope.get("truncate", True):
        raise ValueError(
            "YaRN whose range is not rounded (truncate: false) is not written to GGUF, which has no word for it; "
            "compressed-tensors' schemes, such as W4A16, leave config.json as it is"
        )
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    factor, scales = rope.get("attention_factor"), [rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0]
    if factor is None and all(scales):  # as transformers makes one of them
        one, other = (1 + 0.1 * each * math.log(max(1.0, rope["factor"])) for each in scales)
        factor = one / other
    if factor is not None:
        writer.add_rope_scaling_yarn_attn_factor(factor)
    if rope.get("beta_fast"):
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if rope.get("beta_slow"):
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _window(writer: Any, config: Any) -> None:
    """Writes a window of all layers. Qwen's, of some layers, has no place in llama.cpp's architectures for it."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= config.max_position_embeddings:
        return
    if config.model_type != "mistral":
        raise ValueError(
            f"a {config.model_type} with windows (use_sliding_window) is not written to GGUF, whose architecture has "
            "none; compressed-tensors' schemes, such as W4A16, leave config.json as it is"
        )
    writer.add_sliding_window(window)
    logger.warning(
        "the window of %d tokens is written as llama.attention.sliding_window, which quintet reads; llama.cpp computes "
        "no windows in this architecture, so that its results differ beyond so many tokens",
        window,
    )


def _divisors(config: Any) -> Tensor | None:
    """Divisors of Llama 3's frequencies (Grattafiori et al. 2024, as transformers computes them), [head_dim / 2]."""
    rope = config.rope_parameters or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    lengths = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
    share = (original / lengths - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    between = 1 / ((1 - share) / factor + share)
    return torch.where(lengths < high, 1.0, torch.where(lengths > low, float(factor), between))


def _tokenizer(writer: Any, original: SourceCheckpoint) -> None:
    tokenizer = load_tokenizer(original.folder)
    metadata = gguf_tokens.metadata(tokenizer, original.config.vocab_size)
    writer.add_tokenizer_model(metadata["model"])
    writer.add_token_list(metadata["tokens"])
    writer.add_token_types(metadata["token_type"])
    if "pre" in metadata:
        writer.add_tokenizer_pre(metadata["pre"])
        writer.add_token_merges(metadata["merges"])
    else:
        writer.add_token_scores(metadata["scores"])
        writer.add_add_space_prefix(metadata["add_space_prefix"])
    writer.add_add_bos_token(metadata["add_bos_token"])
    writer.add_add_eos_token(metadata["add_eos_token"])
    for add, number in _named(tokenizer, original).items():
        getattr(writer, f"add_{add}_token_id")(number)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(_templates(tokenizer.chat_template))


def _named(tokenizer: Any, original: SourceCheckpoint) -> Entries:
    """The first id that ends a text is EOS, a second that of a turn; both end an answer."""
    ends = load_generation_config(original.folder)["eos_token_id"] or list(tokenizer.eos_ids)
    turns = [each for each in tokenizer.eos_ids if each in ends] + list(ends)
    found = {"bos": tokenizer.bos_id, "eos": turns[0] if turns else None}
    found["eot"] = next((each for each in ends if each != found["eos"]), None)
    pad = tokenizer.special_tokens.get("pad_token")
    found["pad"] = None if pad is None else tokenizer.token_id(pad)
    return {name: each for name, each in found.items() if each is not None}


def _templates(templates: str | dict[str, str]) -> Any:
    return (
        templates
        if isinstance(templates, str)
        else [{"name": name, "template": each} for name, each in templates.items()]
    )
