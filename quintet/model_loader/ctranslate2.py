"""Whisper models in CTranslate2's folders, as faster-whisper has them: weights by transformers' names, and configs.

A variable of the file is a name, a shape, a type and bytes. Products of one attention are joined there (queries, keys
and values), matrices may be int8 with a scale for each row. Source: CTranslate2's python/ctranslate2/specs.
"""

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintet.common.json_files import read_object
from quintet.gguf.architectures.whisper import token_entries
from quintet.gguf.cursor import CorruptFile, Cursor, format_name
from quintet.model_loader.torch_checkpoint import TensorHeader

MODEL = "model.bin"
BINARY_VERSION, SPEC, REVISION = 6, "WhisperSpec", 3
DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)  # by their numbers
QUANTIZED = (torch.int8, torch.int16)
MAX_VARIABLES = 2**15  # whisper-large has 1,120
MAX_AXES = 3
MIN_VARIABLE = 2 + 1 + 1 + 1 + 4 + 1  # bytes that one takes
_HEAD = struct.pack("<IH", BINARY_VERSION, len(SPEC) + 1) + SPEC.encode() + b"\0"
_SCALE = "_scale"
_REMEDY = "convert the model again with ct2-transformers-converter, or use it in transformers' layout"

_MODULES = {  # of the file -> of transformers; several: its rows are theirs, one after the other
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
_OUTER = {
    "encoder/conv1": "encoder.conv1", "encoder/conv2": "encoder.conv2",
    "encoder/position_encodings": "encoder.embed_positions", "encoder/layer_norm": "encoder.layer_norm",
    "decoder/embeddings": "decoder.embed_tokens", "decoder/position_encodings": "decoder.embed_positions",
    "decoder/layer_norm": "decoder.layer_norm",
}  # fmt: skip
_PARAMETERS = {"weight": "weight", "gamma": "weight", "encodings": "weight", "bias": "bias", "beta": "bias"}
_LAYER = re.compile(r"(encoder|decoder)/layer_(\d{1,4})/(.+)")
_HEAD_NAME = "proj_out.weight"  # transformers ties it to the embeddings
_REQUIRED_SCALARS = {  # values of variables without axes that Whisper has
    "decoder/activation": (3,), "decoder/alibi": (0,), "decoder/pre_norm": (1,), "decoder/scale_embeddings": (0,),
    "decoder/start_from_zero_embedding": (0,), "encoder/pre_norm": (1,), "encoder/activation": (3,),
    "decoder/multi_query_attention": (0,), "decoder/layernorm_embedding": (0,), "decoder/no_final_norm": (0,),
}  # fmt: skip


@dataclass(frozen=True)
class CTranslate2Entry:
    """Location of a tensor by transformers' name, and how it is made. Quantized matrices become float32."""

    name: str  # in the file
    data: Tensor  # uint8, the whole file
    dtype_stored: torch.dtype
    shape_stored: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    scale: "CTranslate2Entry | None" = None  # float32 [rows] or [], by which stored numbers are divided
    rows: tuple[int, int] | None = None  # first and last + 1, of what the file has joined

    @property
    def dtype(self) -> torch.dtype:
        return self.dtype_stored if self.scale is None else torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shape_stored if self.rows is None else (self.rows[1] - self.rows[0], *self.shape_stored[1:])

    def tensor(self) -> Tensor:
        """Returns a copy: the file aligns nothing."""
        first, count = self._range()
        itemsize = self.dtype_stored.itemsize
        raw = self.data[first : first + count * itemsize].clone()
        stored = raw.view(self.dtype_stored).view(self.shape)
        if self.scale is None:
            return stored
        scale = self.scale if self.rows is None or not self.scale.shape else replace(self.scale, rows=self.rows)
        divisor = scale.tensor()
        return stored.float() / divisor.view(-1, *[1] * (len(self.shape) - 1)) if divisor.dim() else stored / divisor

    def _range(self) -> tuple[int, int]:
        """Returns the offset of the first byte and the number of elements."""
        if self.rows is None:
            return self.start, math.prod(self.shape_stored)
        per_row = math.prod(self.shape_stored[1:])
        return self.start + self.rows[0] * per_row * self.dtype_stored.itemsize, math.prod(self.shape)


class CTranslate2File:
    """model.bin by transformers' names of WhisperForConditionalGeneration, with the methods of safetensors' files.

    ValueError names the file and what of it is damaged, or is not Whisper's.
    """

    def __init__(self, path: Path) -> None:
        """Reads the names and shapes; numbers are read by get_tensor()."""
        if not path.is_file():
            raise ValueError(f"{path} is no regular file; fetch it again")
        try:
            with path.open("rb") as stream:
                if stream.seek(0, 2) < len(_HEAD):
                    raise CorruptFile("it is shorter than the beginning of a CTranslate2 model")
                data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            self.variables, aliases = _read(data)
            self._check_scalars()
            self._entries = dict(self._named(aliases))
            if not any(name.startswith("model.encoder.layers.") for name in self._entries):
                raise CorruptFile("it has no layers of an encoder")
        except CorruptFile as error:
            raise ValueError(f"{path}: {error}; fetch it again, or {_REMEDY}") from None

    def keys(self) -> list[str]:
        """Returns transformers' names; the head is there only where the file does not tie it to the embeddings."""
        return list(self._entries)

    def entry(self, name: str) -> CTranslate2Entry:
        """KeyError if there is none of this name."""
        return self._entries[name]

    def get_slice(self, name: str) -> TensorHeader:
        return TensorHeader(self._entries[name].shape, self._entries[name].dtype)

    def get_tensor(self, name: str) -> Tensor:
        """Returns a copy in the file's type; float32 where the file has int8 or int16 with scales."""
        return self._entries[name].tensor()

    def scalar(self, name: str) -> int:
        """Returns a variable without axes, such as encoder/num_heads. CorruptFile if it is missing."""
        entry = self.variables.get(name)
        if entry is None or entry.shape_stored:
            raise CorruptFile(f"it lacks {name}")
        return int(entry.tensor())

    def _check_scalars(self) -> None:
        for name, allowed in _REQUIRED_SCALARS.items():
            if name in self.variables and self.scalar(name) not in allowed:
                raise CorruptFile(f"{name} is {self.scalar(name)}, and Whisper has {allowed[0]}")

    def _named(self, aliases: Mapping[str, str]) -> Iterator[tuple[str, CTranslate2Entry]]:
        every = {**self.variables, **{alias: self.variables[target] for alias, target in aliases.items()}}
        for name, entry in every.items():
            base, _, last = name.rpartition("/")
            if last.endswith(_SCALE) or not entry.shape_stored:  # options of layers have no axes
                continue
            if entry.dtype_stored in QUANTIZED:
                entry = replace(entry, scale=_scale_of(every, name, entry))
            elif entry.dtype_stored == torch.int32:
                raise CorruptFile(f"{format_name(name)} has integers of 32 bits, which quintet does not read")
            if base == "decoder/projection":
                if last == "bias" and entry.tensor().any():
                    raise CorruptFile("its head has a bias, and Whisper's has none")
                if last == "weight" and aliases.get(name) != "decoder/embeddings/weight":
                    yield _HEAD_NAME, entry
                continue
            yield from _placed(name, base, last, entry)


def _placed(name: str, base: str, last: str, entry: CTranslate2Entry) -> Iterator[tuple[str, CTranslate2Entry]]:
    """Yields a variable by transformers' names."""
    layer = _LAYER.fullmatch(base)
    modules = _MODULES.get(layer[3], ()) if layer else ((_OUTER[base],) if base in _OUTER else ())
    parameter = _PARAMETERS.get(last)
    if not modules or parameter is None:
        raise CorruptFile(f"it has a variable {format_name(name)}, which Whisper does not have")
    prefix = f"model.{layer[1]}.layers.{layer[2]}." if layer else "model."
    size, remainder = divmod(entry.shape_stored[0], len(modules))
    if remainder:
        raise CorruptFile(f"{format_name(name)} has {entry.shape_stored[0]} rows, no multiple of {len(modules)}")
    for index, module in enumerate(modules):
        part = entry if len(modules) == 1 else replace(entry, rows=(index * size, (index + 1) * size))
        if module.endswith("k_proj") and parameter == "bias":
            if part.tensor().any():
                raise CorruptFile(f"{format_name(name)} has a bias of keys, and Whisper has none")
            continue
        yield f"{prefix}{module}.{parameter}", part


def _scale_of(every: Mapping[str, CTranslate2Entry], name: str, entry: CTranslate2Entry) -> CTranslate2Entry:
    scale = every.get(name + _SCALE) or every.get(entry.name + _SCALE)  # of what an alias names
    if scale is None or scale.dtype_stored != torch.float32 or scale.shape_stored not in ((), entry.shape_stored[:1]):
        raise CorruptFile(f"{format_name(name)} is of {entry.dtype_stored} and has no scale for each of its rows")
    return scale


def _read(data: mmap.mmap) -> tuple[dict[str, CTranslate2Entry], dict[str, str]]:
    """Returns the variables, and for each alias the variable that it names."""
    cursor, whole = Cursor(data), torch.frombuffer(data, dtype=torch.uint8)
    version = cursor.number("I", "the version")
    if version != BINARY_VERSION:
        raise CorruptFile(f"it is of binary version {version}, or no CTranslate2 model; quintet reads {BINARY_VERSION}")
    spec, revision = _text(cursor, "the kind of model"), cursor.number("I", "the revision")
    if spec != SPEC or revision != REVISION:
        raise CorruptFile(f"it is {format_name(spec)} of revision {revision}; quintet reads {SPEC} {REVISION}")
    count = cursor.number("I", "the number of variables")
    if count > min(MAX_VARIABLES, (cursor.end - cursor.at) // MIN_VARIABLE):
        raise CorruptFile(f"it is of {count} variables, more than it has room for or a model has")
    variables: dict[str, CTranslate2Entry] = {}
    for index in range(count):
        name = _text(cursor, f"the name of variable {index}")
        if name in variables:
            raise CorruptFile(f"variable {format_name(name)} is there twice")
        variables[name] = _read_variable(cursor, name, whole)
    aliases: dict[str, str] = {}
    count = cursor.number("I", "the number of aliases")
    if count > MAX_VARIABLES:
        raise CorruptFile(f"it is of {count} aliases, more than a model has")
    for index in range(count):
        alias, target = _text(cursor, f"alias {index}"), _text(cursor, f"the target of alias {index}")
        if target not in variables or alias in variables or alias in aliases:
            raise CorruptFile(f"alias {format_name(alias)} of {format_name(target)} cannot be: one is missing or twice")
        aliases[alias] = target
    if cursor.at != cursor.end:
        raise CorruptFile(f"it goes on for {cursor.end - cursor.at} bytes after its last alias")
    return variables, aliases


def _read_variable(cursor: Cursor, name: str, whole: Tensor) -> CTranslate2Entry:
    what = f"variable {format_name(name)}"
    axes = cursor.number("B", what)
    if axes > MAX_AXES:
        raise CorruptFile(f"{what} has {axes} axes, more than {MAX_AXES}")
    shape = tuple(cursor.number("I", what) for _ in range(axes))
    kind, size = cursor.number("B", what), cursor.number("I", what)
    if kind >= len(DTYPES):
        raise CorruptFile(f"{what} is of type {kind}, which quintet does not know")
    wanted = DTYPES[kind].itemsize * math.prod(shape)
    if wanted != size or not size:
        raise CorruptFile(f"{what} has {size} bytes, and its shape {list(shape)} takes {wanted}")
    return CTranslate2Entry(name, whole, DTYPES[kind], shape, cursor.skip(size, what))


def _text(cursor: Cursor, what: str) -> str:
    size = cursor.number("H", f"the length of {what}")
    first = cursor.skip(size, what)
    raw = cursor.data[first : cursor.at]
    if size < 2 or raw[-1:] != b"\0" or not raw[:-1].isascii() or not raw[:-1].decode().isprintable():
        raise CorruptFile(f"{what} is no name that ends with a zero byte")
    return raw[:-1].decode()


def is_ctranslate2(folder: Path) -> bool:
    """Returns whether a folder has a Whisper model of CTranslate2: model.bin that begins as one."""
    file = folder / MODEL
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(_HEAD)) == _HEAD


def state_dict_of(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of the folder's model.bin, by transformers' names. ValueError as CTranslate2File()."""
    file = CTranslate2File(folder / MODEL)
    return {name: file.get_tensor(name) for name in file.keys()}


class _TokenIds(NamedTuple):
    """Ids that follow from a vocabulary's size. Source: openai-whisper's tokenizer.py, Whisper.num_languages."""

    eot: int
    languages: int

    @classmethod
    def of_vocabulary(cls, size: int) -> "_TokenIds":
        multilingual = size >= 51865
        return cls(50257 if multilingual else 50256, max(0, size - 51765 - multilingual))


def config_of(folder: Path) -> dict[str, Any]:
    """Returns transformers' config.json of the model, from shapes of its tensors. ValueError as CTranslate2File()."""
    path = folder / MODEL
    file = CTranslate2File(path)
    try:
        return _config(file)
    except CorruptFile as error:
        raise ValueError(f"{path}: {error}; fetch it again, or {_REMEDY}") from None


def _config(file: CTranslate2File) -> dict[str, Any]:
    def shape(name: str, axes: int) -> tuple[int, ...]:
        found = file.entry(name).shape if name in file.keys() else ()
        if len(found) != axes:
            raise CorruptFile(f"{name} is {list(found)}, not of {axes} axes")
        return found

    vocab_size, width = shape("model.decoder.embed_tokens.weight", 2)
    eot = _TokenIds.of_vocabulary(vocab_size).eot
    config: dict[str, Any] = {
        "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True,
        "vocab_size": vocab_size, "d_model": width, "num_mel_bins": shape("model.encoder.conv1.weight", 3)[1],
        "max_source_positions": shape("model.encoder.embed_positions.weight", 2)[0],
        "max_target_positions": shape("model.decoder.embed_positions.weight", 2)[0],
        "activation_function": "gelu", "scale_embedding": False, "tie_word_embeddings": _HEAD_NAME not in file.keys(),
        "bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot, "decoder_start_token_id": eot + 1,
        "dtype": str(file.entry("model.encoder.conv1.weight").dtype).removeprefix("torch."),
    }  # fmt: skip
    for part in ("encoder", "decoder"):
        pattern = re.compile(rf"model\.{part}\.layers\.(\d+)\.")
        layers = {int(found[1]) for name in file.keys() if (found := pattern.match(name))}
        if layers != set(range(len(layers))):
            raise CorruptFile(f"its {part} has layers {sorted(layers)[:8]}, not one after the other")
        heads = file.scalar(f"{part}/num_heads")
        if heads < 1 or width % heads:
            raise CorruptFile(f"{part}/num_heads is {heads}, and the width {width}")
        config |= {
            f"{part}_layers": len(layers), f"{part}_attention_heads": heads,
            f"{part}_ffn_dim": shape(f"model.{part}.layers.0.fc1.weight", 2)[0],
        }  # fmt: skip
    return config


def generation_config_of(folder: Path) -> dict[str, Any]:
    """Returns generation_config.json's entries: what CTranslate2 keeps in config.json, and ids of special tokens.

    The ids follow from the vocabulary's size, as openai-whisper computes them. ValueError for entries of wrong types.
    """
    config, model = read_object(folder / "config.json"), config_of(folder)
    size = model["vocab_size"]
    ids = _TokenIds.of_vocabulary(size)
    found = {**token_entries(ids.eot, ids.languages), "max_length": model["max_target_positions"]}
    names = {"suppress_ids": "suppress_tokens", "suppress_ids_begin": "begin_suppress_tokens"}
    for ours, theirs in names.items():
        tokens = config.get(ours) or []
        if not isinstance(tokens, list) or not all(type(each) is int and each < size for each in tokens):
            raise ValueError(f"{folder / 'config.json'}: {ours} is no list of token ids; fetch it again")
        found[theirs] = [each for each in tokens if each >= 0]
    heads = config.get("alignment_heads") or []
    if not isinstance(heads, list) or not all(_is_pair(each) for each in heads):
        raise ValueError(f"{folder / 'config.json'}: alignment_heads is no list of layers and heads; fetch it again")
    return {**found, "alignment_heads": heads}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(each) is int and each >= 0 for each in value)
