"""A CTranslate2 folder of Whisper as the files of whisper.cpp and OpenVINO.

Source: whisper.cpp's models/convert-h5-to-ggml.py and src/whisper.cpp (order of the header, names of tensors).
"""

import json
import struct
import subprocess
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from quintet.model_loader.ctranslate2 import config_of, generation_config_of, state_dict_of

MAGIC, F32, F16, Q8_0 = 0x67676D6C, 0, 1, 8
FILE_TYPES = {"float32": 1, "int8": 2007}  # of whisper.cpp's header: a kind, and 1,000 times the version of its blocks
PLAIN = ("conv1.bias", "conv2.bias", "positional_embedding")  # stay float32, as whisper.cpp's quantize leaves them
MODULES = {
    "self_attn.k_proj": "attn.key", "self_attn.q_proj": "attn.query", "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out", "self_attn_layer_norm": "attn_ln", "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.q_proj": "cross_attn.query", "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out", "encoder_attn_layer_norm": "cross_attn_ln", "fc1": "mlp.0",
    "fc2": "mlp.2", "final_layer_norm": "mlp_ln",
}  # fmt: skip
OUTER = {
    "encoder.layer_norm": "encoder.ln_post", "decoder.layer_norm": "decoder.ln",
    "decoder.embed_tokens": "decoder.token_embedding",
}  # fmt: skip


def ggml(folder: Path, form: str, target: Path) -> Path:
    """Writes whisper.cpp's file: as it is published, in float16, or Q8_0 for int8."""
    config, tensors = config_of(folder), state_dict_of(folder)
    sizes = (
        "vocab_size", "max_source_positions", "d_model", "encoder_attention_heads", "encoder_layers",
        "max_target_positions", "d_model", "decoder_attention_heads", "decoder_layers", "num_mel_bins",
    )  # fmt: skip
    with target.open("wb") as out:
        _integers(out, MAGIC, *(config[name] for name in sizes), FILE_TYPES[form])
        filters = np.asarray(WhisperFeatureExtractor(feature_size=config["num_mel_bins"]).mel_filters).T
        _integers(out, *filters.shape)
        out.write(np.ascontiguousarray(filters, np.float32).tobytes())
        _write_vocabulary(out, folder / "tokenizer.json")
        for name, tensor in tensors.items():
            if not name.startswith("proj_out"):
                _write_tensor(out, _ggml_name(name), tensor.float().numpy(), form)
    return target


def _integers(out: BinaryIO, *numbers: int) -> None:
    out.write(struct.pack(f"<{len(numbers)}i", *numbers))


def _write_vocabulary(out: BinaryIO, tokenizer: Path) -> None:
    """Writes the bytes of all tokens but the special ones, which whisper.cpp knows."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    of_sign = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    texts = [text for text in sorted(vocabulary, key=vocabulary.__getitem__) if not text.startswith("<|")]
    _integers(out, len(texts))
    for text in texts:
        encoded = bytes(of_sign[sign] for sign in text)
        _integers(out, len(encoded))
        out.write(encoded)


def _ggml_name(name: str) -> str:
    """Returns whisper.cpp's name of a tensor of transformers'."""
    stem, last = name.removeprefix("model.").rsplit(".", 1)
    if stem.endswith("embed_positions"):
        return stem.replace("embed_positions", "positional_embedding")
    if ".layers." not in stem:
        return f"{OUTER.get(stem, stem)}.{last}"
    part, _, layer, module = stem.split(".", 3)
    return f"{part}.blocks.{layer}.{MODULES[module]}.{last}"


def _write_tensor(out: BinaryIO, name: str, numbers: np.ndarray[Any, Any], form: str) -> None:
    if name.endswith(PLAIN[:2]):
        numbers = numbers[:, None]
    kind, data = F32, np.ascontiguousarray(numbers, np.float32)
    if numbers.ndim > 1 and not name.endswith(PLAIN):
        if form == "int8" and numbers.ndim == 2:  # convolutions stay float16
            kind, data = Q8_0, gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0)
        else:
            kind, data = F16, data.astype(np.float16)
    encoded = name.encode()
    _integers(out, numbers.ndim, len(encoded), kind, *reversed(numbers.shape))
    out.write(encoded)
    out.write(data.tobytes())


def openvino(folder: Path, form: str, target: Path, python: str) -> Path:
    """Writes OpenVINO's folder by optimum-intel, which the interpreter has; weights in 8 bits for int8."""
    published = target.with_name(f"{target.name}-published")
    _write_published(folder, published)
    command = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino", "-m", str(published)]
    task, weights = "automatic-speech-recognition-with-past", {"float32": "fp32"}.get(form, form)
    subprocess.run([*command, "--task", task, "--weight-format", weights, str(target)], check=True)
    return target


def _write_published(folder: Path, target: Path) -> None:
    """Writes the folder as transformers has it."""
    target.mkdir(parents=True, exist_ok=True)
    config = config_of(folder)
    tensors = {name: tensor.float() for name, tensor in state_dict_of(folder).items()}
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(WhisperConfig(**{**config, "dtype": "float32"}))
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    entries = generation_config_of(folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    special = {each["content"]: each["id"] for each in vocabulary["added_tokens"]}
    codes = [name for name, at in special.items() if entries["decoder_start_token_id"] < at < _first_task(entries)]
    if entries["is_multilingual"]:
        entries["lang_to_id"] = {code: special[code] for code in codes}
    model.generation_config = GenerationConfig(**entries)
    model.save_pretrained(target)
    WhisperFeatureExtractor(feature_size=config["num_mel_bins"]).save_pretrained(target)
    (target / "tokenizer.json").write_text(json.dumps(vocabulary))
    (target / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "WhisperTokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }))  # fmt: skip


def _first_task(entries: dict[str, Any]) -> int:
    return min(entries["task_to_id"].values())
