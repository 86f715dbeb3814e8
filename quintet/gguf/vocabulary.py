"""Reads and checks the vocabulary in a GGUF file's metadata: tokens, kinds, scores, merges, and names."""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from quintet.common.suggestions import nearest_name
from quintet.gguf.cursor import Array, format_name
from quintet.gguf.pretokenizers import WORDS

MAX_TOKENS = 2**21  # tokens, and merges: eight times those of the largest vocabulary known
READ = ("llama", "gpt2", "gemma4", "bert", "t5")
REFUSED = {
    "rwkv": "RWKV's own",
    "plamo2": "PLaMo 2's own",
    "hybriddna": "one of DNA",
    "whitespace": "one of whole words",
    "test": "one for tests",
    "none": "none",
    "no_vocab": "none",
}
NAMED = {  # of "tokenizer.ggml.<...>_token_id" -> what transformers calls the token
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "seperator": "sep_token",  # the format's own spelling
    "padding": "pad_token",
    "mask": "mask_token",
}
# Ids that hold where a file says nothing, as in llama.cpp.
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11},
    "gemma4": {},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
# Tokens that end an answer, by their text: many files name one of several.
ENDS = frozenset(
    (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
        "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
        "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
    )
)  # fmt: skip
# Where a model fills a hole in a text, these end what it writes.
HOLES = frozenset(
    (
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
        "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
    )
)  # fmt: skip
ALSO_END = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # of "tokenizer.ggml.<...>_token_id"
# Part of a model's text, whatever kind the file gives them: the output parser splits an answer's channels by them.
CHANNEL_MARKERS = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))


class TokenKind(IntEnum):
    """Kind of a token; the numbers are the format's."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as the file describes it."""

    model: str  # one of READ
    pre: str  # a key of WORDS; of a byte-level model
    tokens: Sequence[str]  # by their ids
    kinds: Sequence[int]  # of Kind
    # of a unigram model; of an SPM model, or a byte-level one without merges: the highest is made of a pair first
    scores: Sequence[float]
    merges: Sequence[tuple[str, str]]  # of a byte-level model: the first first
    special_ids: Mapping[str, int]  # of NAMED -> id
    end_ids: tuple[int, ...]  # ids that end an answer, in their order
    add_bos: bool
    add_eos: bool
    add_space: bool  # before a text, and after a control token
    lowercase: bool  # of a WordPiece model
    strip_accents: bool
    strips: bool  # control tokens take the spaces behind them
    charsmap: bytes  # of a unigram model: SentencePiece's compiled rules of normalization; empty: none

    @property
    def pairs(self) -> Iterator[tuple[str, int]]:
        """Tokens, each with its kind."""
        return zip(self.tokens, self.kinds, strict=True)


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Reads the vocabulary of a file's metadata, as quintet.gguf.file returns it. ValueError names what is wrong."""
    tokenizer = _TokenizerMetadata(metadata)
    model = _model(tokenizer)
    pre = _pre(tokenizer, model)
    tokens = _tokens(tokenizer)
    stated = tokenizer.numbers("token_type", int, len(tokens))
    kinds = stated or [TokenKind.NORMAL] * len(tokens)
    named = _ids(tokenizer, model, len(tokens))
    ends = _ends(tokenizer, tokens, named)
    plain = {"</s>"} if model == "gpt2" and stated else set()  # HTML's tag, where it is no EOS
    plain -= {tokens[named["eos"]]} if "eos" in named else set()
    kinds = _corrected(tokens, kinds, ends, plain)
    spm, wordpiece, unigram = (model == each for each in ("llama", "bert", "t5"))
    by_rank = model == "gpt2" and tokenizer.get("merges") is None  # whisper.cpp's, where scores are ranks
    scores = tokenizer.numbers("scores", float, len(tokens)) if spm or unigram or by_rank else []
    scores = [0.0] * len(tokens) if scores is None and not by_rank else scores or []
    if unigram:
        _name_unused(tokens, kinds, scores, named)
    lowercase = tokenizer.flag("normalizer.lowercase", True)
    bos = pre == "gemma4" or tokenizer.flag("add_bos_token", not unigram and (spm or wordpiece or WORDS[pre].bos))
    eos = tokenizer.flag("add_eos_token", unigram)
    if wordpiece:
        bos, eos = True, True
    for flag, name in ((bos, "bos"), (eos, "seperator" if wordpiece else "eos")):
        if flag and name not in named:
            raise ValueError(f"it says that a text has {name.upper()} and names no {name}_token_id; {_REMEDY}")
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        kinds=kinds,
        scores=scores,
        merges=() if spm or wordpiece or unigram or scores else _merges(tokenizer),
        special_ids=named,
        end_ids=ends,
        add_bos=bos,
        add_eos=eos,
        add_space=tokenizer.flag("add_space_prefix", spm),
        lowercase=lowercase,
        strip_accents=tokenizer.flag("normalizer.strip_accents", lowercase),
        strips=any(each in str(metadata.get("general.name", "")).lower() for each in ("phi-3", "phi3")),
        charsmap=_charsmap(tokenizer) if unigram else b"",
    )


def read_ends(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end an answer, in their order; none where there is no vocabulary. ValueError as above."""
    tokenizer = _TokenizerMetadata(metadata)
    listed = tokenizer.get("tokens")
    in_file = isinstance(listed, Array) and listed.of_strings and len(listed) <= MAX_TOKENS
    tokens: Sequence[str] = listed if in_file else tokenizer.texts("tokens") or []  # few of which are looked at
    model = tokenizer.get("model")
    return _ends(tokenizer, tokens, _ids(tokenizer, model if model in READ else "gemma4", len(tokens)))


_REMEDY = "give the tokenizer of the model's original with tokenizer=..., or another conversion of the file"


class _TokenizerMetadata:
    """Entries under "tokenizer.ggml.", each of the type that it must have."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        raise ValueError(f"tokenizer.ggml.{name} is {format_name(str(value))}, not true or false; {_REMEDY}")

    def number(self, name: str) -> int | None:
        value = self.get(f"{name}_token_id")
        if value is None or type(value) is int:
            return value
        raise ValueError(
            f"tokenizer.ggml.{name}_token_id is {format_name(str(value))}, not a token's number; {_REMEDY}"
        )

    def items(self, name: str, count: int | None = None) -> list[Any] | None:
        """A list, of so many or more entries, of which as many are taken; None if there is none."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, str | bytes) or not isinstance(value, Sequence) or len(value) > MAX_TOKENS:
            what = f"{len(value)} entries" if isinstance(value, Sequence) else type(value).__name__
            raise ValueError(f"tokenizer.ggml.{name} is no list of up to {MAX_TOKENS} entries but {what}; {_REMEDY}")
        if count is not None and len(value) < count:
            raise ValueError(f"tokenizer.ggml.{name} has {len(value)} entries for {count} tokens; {_REMEDY}")
        return list(value)[:count]

    def numbers(self, name: str, kind: type, count: int) -> list[Any] | None:
        found = self.items(name, count)
        if found is None:
            return None
        if not all(type(each) in (int, kind) and math.isfinite(each) for each in found):
            raise ValueError(f"tokenizer.ggml.{name} holds what is no finite {kind.__name__}; {_REMEDY}")
        return found

    def texts(self, name: str) -> list[str] | None:
        found = self.items(name)
        if found is not None and not all(isinstance(each, str) for each in found):
            raise ValueError(f"tokenizer.ggml.{name} holds what is no text; {_REMEDY}")
        return found


def _model(tokenizer: _TokenizerMetadata) -> str:
    model = tokenizer.get("model")
    if model in READ:
        return str(model)
    if model is None:
        raise ValueError(f"it has no tokenizer (tokenizer.ggml.model); {_REMEDY}")
    what = REFUSED.get(model, "unknown") if isinstance(model, str) else "unknown"
    raise ValueError(
        f"its tokenizer is of the kind {format_name(str(model))} ({what}), and quintet reads {', '.join(READ)}; "
        f"{_REMEDY}"
    )


def _pre(tokenizer: _TokenizerMetadata, model: str) -> str:
    if model in ("llama", "bert", "t5"):
        return "default"
    pre = "gemma4" if model == "gemma4" else tokenizer.get("pre") or "default"
    if pre not in WORDS:
        match = nearest_name(pre, WORDS) if isinstance(pre, str) else None
        hint = f" (the nearest is {match!r})" if match else ""
        raise ValueError(
            f"its tokenizer.ggml.pre, {format_name(str(pre))}, is not a known pre-tokenizer{hint}; {_REMEDY}"
        )
    return str(pre)


def _tokens(tokenizer: _TokenizerMetadata) -> list[str]:
    """Returns distinct tokens: one that is empty, or no text, gets a name that no text has."""
    found = tokenizer.texts("tokens")
    if not found:
        raise ValueError(f"it has no tokens (tokenizer.ggml.tokens); {_REMEDY}")
    tokens = [_text(each, index) for index, each in enumerate(found)]
    if len(set(tokens)) < len(tokens):
        first: dict[str, int] = {}
        twice = next(index for index, each in enumerate(tokens) if first.setdefault(each, index) != index)
        raise ValueError(
            f"its tokens {first[tokens[twice]]} and {twice} are both {format_name(tokens[twice])}; {_REMEDY}"
        )
    return tokens


def _text(token: str, index: int) -> str:
    if not token:
        return f"[EMPTY_{index}]"
    try:
        token.encode()
    except UnicodeEncodeError:
        return f"[BYTES_{index}]"
    return token


def _name_unused(tokens: list[str], kinds: list[int], scores: list[float], special_ids: Mapping[str, int]) -> None:
    """Names the unused tokens of a unigram model, in place: <mask>, which llama.cpp's converter leaves out of
    XLM-RoBERTa's vocabulary, and texts with a space, which no word has. They have no score of their own."""
    normal = (score for score, kind in zip(scores, kinds, strict=True) if kind == TokenKind.NORMAL)
    lowest, mask = min(normal, default=0.0), special_ids.get("mask")
    for number, kind in enumerate(kinds):
        if kind != TokenKind.UNUSED or scores[number] >= lowest:
            continue
        scores[number] = lowest  # an unknown letter's score is below the lowest of all
        if number == mask and "<mask>" not in tokens:
            tokens[number], kinds[number] = "<mask>", TokenKind.CONTROL
        else:
            tokens[number] = f"[UNUSED {number}]"


def _charsmap(tokenizer: _TokenizerMetadata) -> bytes:
    """Returns the rules of normalization. ValueError where their table is longer than all of them."""
    found = tokenizer.items("precompiled_charsmap") or []
    if not all(type(each) is int and -128 <= each < 256 for each in found):
        raise ValueError(f"tokenizer.ggml.precompiled_charsmap holds what is no byte; {_REMEDY}")
    rules = bytes(each & 255 for each in found)
    if rules and (len(rules) < 4 or int.from_bytes(rules[:4], "little") + 4 >= len(rules)):
        raise ValueError(f"tokenizer.ggml.precompiled_charsmap, {len(rules)} bytes, is cut off; {_REMEDY}")
    return rules


def _merges(tokenizer: _TokenizerMetadata) -> list[tuple[str, str]]:
    found = tokenizer.texts("merges")
    if found is None:
        raise ValueError(f"it has no merges (tokenizer.ggml.merges), which a byte-level tokenizer needs; {_REMEDY}")
    pairs: dict[tuple[str, str], None] = {}
    for index, each in enumerate(found):
        cut = each.find(" ", 1)  # the first part may begin with one
        if cut < 0 or cut + 1 == len(each):
            raise ValueError(f"its merge {index} is {format_name(each)}, not two parts and a space between; {_REMEDY}")
        pairs[each[:cut], each[cut + 1 :]] = None
    return list(pairs)


def _ids(tokenizer: _TokenizerMetadata, model: str, count: int) -> dict[str, int]:
    """Returns the ids in the metadata, else the defaults; an id past the vocabulary's end counts as missing."""
    found = {}
    for name in NAMED:
        stated, default = tokenizer.number(name), DEFAULTS[model].get(name)
        if stated is None and name == "seperator":
            stated = tokenizer.number("separator")
        number = default if stated is None or not 0 <= stated < count else stated
        if number is not None and number < count:
            found[name] = number
    return found


def _ends(tokenizer: _TokenizerMetadata, tokens: Sequence[str], named: Mapping[str, int]) -> tuple[int, ...]:
    stated = (tokenizer.number(name) for name in ALSO_END)
    ends = {number for number in (named.get("eos"), *stated) if number is not None and 0 <= number < len(tokens)}
    ends |= set(_positions(tokens, ENDS | HOLES))
    texts = {tokens[number] for number in ends}
    # Where these are, "<|end|>" ends a message and not the answer, and "</s>" is a tag of HTML.
    if {"<|return|>", "<|call|>"} <= texts or texts & {"<|call|>", "<|calls|>"} and "<|flush|>" in texts:
        ends -= {number for number in ends if tokens[number] == "<|end|>"}
    if texts & {"<|tool_response>", "<|plamo:eos|>"}:
        ends -= {number for number in ends if tokens[number] == "</s>"}
    return tuple(sorted(ends))


def _positions(tokens: Sequence[str], texts: Set[str]) -> Iterator[int]:
    if isinstance(tokens, Array):
        return tokens.positions(texts)
    return (number for number, token in enumerate(tokens) if token in texts)


def _corrected(tokens: Sequence[str], kinds: Sequence[int], ends: Sequence[int], plain: Set[str]) -> list[int]:
    """Corrects the file's kinds: tokens that end an answer are control tokens, and channel markers are not. `plain`:
    those that stay normal tokens if the file has them as normal ones."""
    largest = int(max(TokenKind))
    found = [each if 0 <= each <= largest else TokenKind.UNDEFINED for each in kinds]
    for number in ends:
        if tokens[number] not in plain or found[number] != TokenKind.NORMAL:
            found[number] = TokenKind.CONTROL
    for number, token in enumerate(tokens):
        if token in CHANNEL_MARKERS or (token == "<|end|>" and number not in ends):
            found[number] = TokenKind.USER_DEFINED
    return found
