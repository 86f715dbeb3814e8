"""GGUF files that are wrong in one place or a few: counts, types, lengths, axes, offsets, names, and any byte."""

import random
import struct
from pathlib import Path
from typing import Any

from tests.fuzz.mutations import ODD, TEXTS, number, spoilt
from tests.helpers.checkpoints.gguf import Row, header, value

VOCABULARIES = Path(__file__).parents[1] / "data/quantized/gguf/tokenizers"
PRES = ("default", "gpt-2", "qwen2", "llama-bpe", "gpt-4o", "gemma4", "deepseek-llm", "kimi-k2", "nobody's")
MODELS = ("gpt2", "llama", "bert", "gemma4", "t5", "rwkv", "x")
KINDS = (0, 1, 2, 3, 6, 8, 10, 12, 14, 16, 20, 23, 24, 30, 34, 39, 40)


def _metadata(draw: random.Random) -> dict[str, Any]:
    """Of a small model, right as far as it goes."""
    letters = [chr(each) for each in range(33, 127)] + ["ab", "bc", "\u2581", "\u2581a", "<0x0A>", "<|im_end|>", "Ġ"]
    return {
        "general.architecture": "llama", "general.name": "Fuzz", "general.alignment": 32,
        "general.sampling.temp": 0.5, "general.sampling.top_k": 4,
        "llama.context_length": 64, "llama.block_count": 1, "llama.embedding_length": 32,
        "llama.feed_forward_length": 64, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0, "llama.vocab_size": 100,
        "tokenizer.ggml.model": draw.choice(MODELS), "tokenizer.ggml.pre": draw.choice(PRES),
        "tokenizer.ggml.tokens": letters, "tokenizer.ggml.scores": [-float(each) for each in range(len(letters))],
        "tokenizer.ggml.token_type": [draw.choice((1, 1, 1, 3, 4, 6)) for _ in letters],
        "tokenizer.ggml.merges": ["a b", "b c"], "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 99,
        "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_bos_token": draw.random() < 0.5,
        "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip


def _tensors() -> list[Row]:
    """Of a layer and both ends, one behind the other."""
    shapes = {
        "token_embd.weight": (32, 100), "output_norm.weight": (32,), "output.weight": (32, 100),
        "blk.0.attn_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32), "blk.0.attn_k.weight": (32, 32),
        "blk.0.attn_v.weight": (32, 32), "blk.0.attn_output.weight": (32, 32), "blk.0.ffn_norm.weight": (32,),
        "blk.0.ffn_gate.weight": (32, 64), "blk.0.ffn_up.weight": (32, 64), "blk.0.ffn_down.weight": (64, 32),
    }  # fmt: skip
    rows, at = [], 0
    for name, axes in shapes.items():
        kind = 8 if len(axes) > 1 else 0
        rows.append(Row(name, axes, kind, at))
        count = axes[0] * (axes[1] if len(axes) > 1 else 1)
        size = count * 4 if kind == 0 else count // 32 * 34
        at += size + -size % 32
    return rows


DATA = 2**15  # bytes of the tensors and more


def gguf(draw: random.Random) -> bytes:
    """One file."""
    way = draw.random()
    if way < 0.02:  # of a size that takes its time
        raw = draw.choice(sorted(VOCABULARIES.glob("*.gguf"))).read_bytes()
        return spoilt(raw, draw)
    metadata, rows = _metadata(draw), _tensors()
    if way < 0.35:
        return spoilt(header(metadata, rows), draw) + bytes(DATA)
    counts = None
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        place = draw.random()
        if place < 0.5:
            _entry(metadata, draw)
        elif place < 0.95:
            _row(rows, draw)
        else:
            tensors, entries = ((len(each), number(draw, DATA) % 2**64) for each in (rows, metadata))
            counts = draw.choice(tensors), draw.choice(entries)
    whole = header(metadata, rows, draw.choice((3, 3, 3, 3, 2, 1, 4)), counts)
    return whole + bytes(draw.choice((DATA, DATA, DATA, 0, 100)))


def _entry(metadata: dict[str, Any], draw: random.Random) -> None:
    """Another value, of the same type or any; another name; none; a list that says that it is longer."""
    key, way = draw.choice(list(metadata)), draw.randrange(9)
    if way == 0:
        del metadata[key]
    elif way == 1:
        other = (f"{key}x", "split.count", "split.no", "split.tensors.count", "tokenizer.chat_template.x")
        metadata[draw.choice(other)] = metadata.pop(key)
    elif way == 2:
        metadata[key] = value(draw.choice(TEXTS))
    elif way == 3:
        metadata[key] = draw.choice((0, 1, 2**31, 2**32 - 1, 0.0, -1.0, float("nan"), float("inf"), True, False))
    elif way == 4:
        metadata[key] = struct.pack("<IQ", draw.choice((10, 11, 12)), number(draw, DATA) % 2**64)
    elif way == 5:
        count, inner = number(draw, DATA) % 2**64, draw.randrange(14)
        metadata[key] = struct.pack("<IIQ", 9, inner, count) + draw.randbytes(draw.choice((0, 16, 200)))
    elif way == 6:
        metadata[key] = struct.pack("<IQ", 8, number(draw, DATA) % 2**64) + b"text"
    elif way == 7:
        metadata[key] = struct.pack("<I", draw.choice((*range(14), 2**32 - 1))) + draw.randbytes(8)
    elif isinstance(metadata[key], list):
        _items(metadata[key], draw)


def _items(items: list[Any], draw: random.Random) -> None:
    at, way = draw.randrange(len(items)), draw.randrange(4)
    if way == 0:
        del items[at:]
        items.append(draw.choice(TEXTS) if not items or isinstance(items[0], str) else items[0])
    elif way == 1:
        items[at] = items[0]
    elif isinstance(items[at], str):
        items[at] = draw.choice(TEXTS)
    else:
        items[at] = type(items[at])(draw.choice((0, 1, 5, 6, 7, 2**31, 10**6)))


def _row(rows: list[Row], draw: random.Random) -> None:
    at, way = draw.randrange(len(rows)), draw.randrange(8)
    row = rows[at]
    if way == 0:
        row = row._replace(axes=tuple(number(draw, DATA) % 2**64 for _ in range(draw.randrange(7))))
    elif way == 1:
        row = row._replace(axes=(*row.axes[:-1], number(draw, DATA) % 2**64))
    elif way == 2:
        row = row._replace(kind=draw.choice((*KINDS, *range(45), 2**31, 2**32 - 1)))
    elif way == 3:
        places = (number(draw, DATA) % 2**64, row.offset + 32, row.offset - row.offset % 64)
        row = row._replace(offset=draw.choice(places))
    elif way == 4:
        row = row._replace(name=draw.choice((*TEXTS, rows[0].name, f"{row.name}x", row.name.replace("0", "9"))))
    elif way == 5:
        row = row._replace(offset=rows[0].offset)
    elif way == 6:
        row = row._replace(axes=row.axes[::-1] or (1,))
    else:
        row = row._replace(axes=(*row.axes, draw.choice(ODD)))
    rows[at] = row
    if draw.random() < 0.05:
        del rows[at]
    if not rows:
        rows.append(Row("x", (1,), 0, 0))
