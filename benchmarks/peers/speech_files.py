"""A CTranslate2 folder of Whisper as the files of whisper.cpp and OpenVINO.

Source: whisper.cpp's models/convert-h5-to-ggml.py and src/whisper.cpp (order of the header, names of tensors).
"""

import json
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from quintet.gguf.whisper_cpp import MAGIC, MODULES, OUTER, letters_of_bytes
from quintet.model_loader.ctranslate2 import config_of, generation_config_of, state_dict_of

F16, Q8_0 = GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0
FORMS = {"float32": F16, "int8": Q8_0}  # as whisper.cpp's files are published for a form
FTYPES = {  # of the header: a number of ggml's enum ggml_ftype, and 1,000 times the version of its blocks
    F16: 1, Q8_0: 2007, GGMLQuantizationType.Q4_0: 2002, GGMLQuantizationType.Q4_1: 2003,
    GGMLQuantizationType.Q5_0: 2008, GGMLQuantizationType.Q5_1: 2009,
}  # fmt: skip
PLAIN = ("conv1.bias", "conv2.bias", "positional_embedding")  # stay float32, as whisper.cpp's quantize leaves them
NAMES = {module: name for name, module in {**MODULES, **OUTER}.items()}


def ggml(folder: Path, form: str, target: Path) -> Path:
    """Writes a CTranslate2 folder's model as whisper.cpp's file."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    bytes_of = {letter: byte for byte, letter in letters_of_bytes().items()}
    texts = [text for text in sorted(vocabulary, key=vocabulary.__getitem__) if not text.startswith("<|")]
    tokens = [bytes(bytes_of[letter] for letter in text) for text in texts]
    write_ggml(target, config_of(folder), state_dict_of(folder), tokens, FORMS[form])
    return target


def write_ggml(
    target: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], tokens: Sequence[bytes],
    kind: GGMLQuantizationType,
) -> None:  # fmt: skip
    """Writes whisper.cpp's file of a Whisper model by transformers' config and tensors; `tokens`: those of text."""
    sizes = (
        "vocab_size", "max_source_positions", "d_model", "encoder_attention_heads", "encoder_layers",
        "max_target_positions", "d_model", "decoder_attention_heads", "decoder_layers", "num_mel_bins",
    )  # fmt: skip
    with target.open("wb") as out:
        out.write(MAGIC)
        _integers(out, *(config[name] for name in sizes), FTYPES[kind])
        filters = np.asarray(WhisperFeatureExtractor(feature_size=config["num_mel_bins"]).mel_filters).T
        _integers(out, *filters.shape)
        out.write(np.ascontiguousarray(filters, np.float32).tobytes())
        _integers(out, len(tokens))
        for token in tokens:
            _integers(out, len(token))
            out.write(token)
        for name, tensor in tensors.items():
            if not name.startswith("proj_out"):
                _write_tensor(out, _ggml_name(name), tensor.float().numpy(), kind)


def _integers(out: BinaryIO, *numbers: int) -> None:
    out.write(struct.pack(f"<{len(numbers)}i", *numbers))


def _ggml_name(name: str) -> str:
    """Returns whisper.cpp's name of a tensor of transformers'."""
    stem, last = name.removeprefix("model.").rsplit(".", 1)
    if stem.endswith("embed_positions"):
        return NAMES[stem]
    if ".layers." not in stem:
        return f"{NAMES[stem]}.{last}"
    part, _, layer, module = stem.split(".", 3)
    return f"{part}.blocks.{layer}.{NAMES[module]}.{last}"


def _write_tensor(out: BinaryIO, name: str, numbers: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> None:
    if name.endswith(PLAIN[:2]):
        numbers = numbers[:, None]
    if numbers.ndim < 2 or name.endswith(PLAIN):
        kind = GGMLQuantizationType.F32
    elif numbers.ndim > 2:  # convolutions
        kind = F16
    data, encoded = gguf.quants.quantize(np.ascontiguousarray(numbers, np.float32), kind), name.encode()
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
