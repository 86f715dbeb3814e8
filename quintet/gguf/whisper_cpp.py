"""Whisper models in whisper.cpp's files (ggml-base.en.bin, ggml-large-v3-turbo-q5_0.bin), read as one of GGUF.

A file has sizes, mel filters, the vocabulary and the tensors, whose types are GGUF's. It has no special tokens and no
merges: both follow from the vocabulary. Source: whisper.cpp's models/convert-pt-to-ggml.py and src/whisper.cpp.
"""

import math
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from quintet.gguf.cursor import CorruptFile, Cursor, format_name
from quintet.gguf.tensor_types import GGUFTensor, sized
from quintet.gguf.vocabulary import TokenKind
from quintet.media.audio.whisper_vocabulary import NAMES, SECONDS_PER_TIMESTAMP, TIMESTAMPS

MAGIC = struct.pack("<I", 0x67676D6C)
ARCHITECTURE = "whisper"
SIZES = (  # in the file's order
    "vocab_size", "audio.context_length", "audio.embedding_length", "audio.head_count", "audio.block_count",
    "text.context_length", "text.embedding_length", "text.head_count", "text.block_count", "mel_bins",
)  # fmt: skip
MAX_SIZE, MAX_TOKEN, MAX_AXES, MAX_TENSORS = 2**20, 2**12, 3, 2**15
SPECIAL_TOKENS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
MODULES = {  # of a layer: name in the file -> module of transformers
    "attn.query": "self_attn.q_proj", "attn.key": "self_attn.k_proj", "attn.value": "self_attn.v_proj",
    "attn.out": "self_attn.out_proj", "attn_ln": "self_attn_layer_norm", "cross_attn.query": "encoder_attn.q_proj",
    "cross_attn.key": "encoder_attn.k_proj", "cross_attn.value": "encoder_attn.v_proj",
    "cross_attn.out": "encoder_attn.out_proj", "cross_attn_ln": "encoder_attn_layer_norm", "mlp.0": "fc1",
    "mlp.2": "fc2", "mlp_ln": "final_layer_norm",
}  # fmt: skip
OUTER = {
    "encoder.ln_post": "encoder.layer_norm", "decoder.ln": "decoder.layer_norm", "encoder.conv1": "encoder.conv1",
    "decoder.token_embedding": "decoder.embed_tokens", "encoder.conv2": "encoder.conv2",
    "encoder.positional_embedding": "encoder.embed_positions",
    "decoder.positional_embedding": "decoder.embed_positions",
}  # fmt: skip
_BLOCK = re.compile(r"(encoder|decoder)\.blocks\.(\d{1,3})\.(.+)")


def read_whisper_cpp(cursor: Cursor) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Returns metadata under GGUF's keys, and the tensors by the file's names. CorruptFile names what is wrong."""
    cursor.at = len(MAGIC)
    sizes = {name: cursor.number("i", name) for name in SIZES}
    for name, size in sizes.items():
        if not 1 <= size <= MAX_SIZE:
            raise CorruptFile(f"{name} is {size}, not 1 to {MAX_SIZE}: it is no file of whisper.cpp, or is damaged")
    cursor.number("i", "the type of the weights")
    _skip_filters(cursor, sizes["mel_bins"])
    tokens = _special(_text_tokens(cursor), sizes["vocab_size"])
    metadata = {f"{ARCHITECTURE}.{name}": size for name, size in sizes.items()} | _tokenizer(tokens)
    return {"general.architecture": ARCHITECTURE, **metadata}, dict(_tensors(cursor))


def module_of(base: str) -> str | None:
    """Returns transformers' module of a tensor's name without its last part; None: Whisper has no such module."""
    if base in OUTER:
        return f"model.{OUTER[base]}"
    block = _BLOCK.fullmatch(base)
    if block is None or block[3] not in MODULES:
        return None
    return f"model.{block[1]}.layers.{int(block[2])}.{MODULES[block[3]]}"


def _skip_filters(cursor: Cursor, mel_bins: int) -> None:
    """Passes over the mel filters, which audio is not turned into frames with: they follow from their number."""
    rows, columns = cursor.number("i", "the mel filters"), cursor.number("i", "the mel filters")
    if rows != mel_bins or not 0 < columns <= MAX_SIZE:
        raise CorruptFile(f"its mel filters are {rows} by {columns}, and the model has {mel_bins}")
    cursor.skip(4 * rows * columns, "the mel filters")


def letters_of_bytes() -> dict[int, str]:
    """Returns the letters that byte-level BPE writes for bytes. Source: GPT-2's encoder.py."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return {byte: chr(byte if byte in kept else next(moved)) for byte in range(256)}


def _text_tokens(cursor: Cursor) -> list[str]:
    """Reads the tokens of text, in letters of bytes."""
    letters = letters_of_bytes()
    count = cursor.number("i", "the number of tokens")
    if not 1 <= count <= min(MAX_SIZE, (cursor.end - cursor.at) // 4):
        raise CorruptFile(f"it is of {count} tokens, more than it has room for, or of none")
    found = []
    for index in range(count):
        size = cursor.number("I", f"the length of token {index}")
        if size > MAX_TOKEN:
            raise CorruptFile(f"token {index} has {size} bytes, more than {MAX_TOKEN}")
        first = cursor.skip(size, f"token {index}")
        found.append("".join(map(letters.__getitem__, cursor.data[first : cursor.at])))
    return found


def _special(text: list[str], vocab_size: int) -> list[str]:
    """Returns all tokens: behind those of text the special ones in openai-whisper's order. An older converter has
    written the first of those too."""
    text = text[: text.index("<|endoftext|>")] if "<|endoftext|>" in text else text
    languages = vocab_size - len(text) - 2 - len(SPECIAL_TOKENS) - TIMESTAMPS
    if not 0 <= languages <= len(NAMES):
        raise CorruptFile(f"it is of {vocab_size} tokens, {len(text)} of text, which leaves {languages} languages")
    names = ["endoftext", "startoftranscript", *list(NAMES)[:languages], *SPECIAL_TOKENS]
    times = (f"<|{SECONDS_PER_TIMESTAMP * index:.2f}|>" for index in range(TIMESTAMPS))
    return [*text, *(f"<|{name}|>" for name in names), *times]


def _tokenizer(tokens: Sequence[str]) -> dict[str, Any]:
    """Returns the entries of the tokenizer. A pair is merged that makes the token with the lowest number."""
    eot = tokens.index("<|endoftext|>")
    special = len(tokens) - eot - TIMESTAMPS
    parts = ((TokenKind.NORMAL, eot), (TokenKind.CONTROL, special), (TokenKind.USER_DEFINED, TIMESTAMPS))
    kinds = [int(kind) for kind, count in parts for _ in range(count)]
    entries = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": kinds,
        "scores": [-float(index) for index in range(len(tokens))],
        **{f"{name}_token_id": eot for name in ("bos", "eos", "unknown", "padding")},
    }  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in entries.items()}


def _tensors(cursor: Cursor) -> Iterator[tuple[str, GGUFTensor]]:
    """Reads the tensors up to the end of the file."""
    names: set[str] = set()
    while cursor.at < cursor.end:
        what = f"tensor {len(names)}"
        axes, length, kind = (cursor.number("i", what) for _ in range(3))
        if not 1 <= axes <= MAX_AXES or not 1 <= length <= MAX_TOKEN or len(names) == MAX_TENSORS:
            raise CorruptFile(f"{what} has {axes} axes and a name of {length} bytes, which none of whisper.cpp has")
        shape = tuple(cursor.number("i", what) for _ in range(axes))[::-1]
        first = cursor.skip(length, f"the name of {what}")
        name = cursor.data[first : cursor.at].decode("ascii", "replace")
        base, _, last = name.rpartition(".")
        if last == "positional_embedding":
            base, last, name = name, "weight", f"{name}.weight"
        if name in names or module_of(base) is None:
            raise CorruptFile(f"tensor {format_name(name)} is there twice, or Whisper does not have it")
        names.add(name)
        stored, size = sized(f"tensor {format_name(name)}", kind, shape)
        if last == "bias" and math.prod(shape) == shape[0]:  # of convolutions [outputs, 1]
            shape = shape[:1]
        yield name, GGUFTensor(stored, shape, cursor.skip(size, f"tensor {format_name(name)}"), size)
