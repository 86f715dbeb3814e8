"""A fast tokenizer as GGUF says it: byte-level merges with the name of how words are cut, or SentencePiece's scores."""

import json
from typing import Any

from quintet.gguf.pretokenizers import WORDS
from quintet.gguf.vocabulary import TokenKind
from quintet.quantize.schemes import Entries
from quintet.tokenizers.tokenizer import Tokenizer

SPACE = "\u2581"  # what SentencePiece writes for a space
PROBE = (
    "Hello, I'll say it'S 12345 times... don't\n\n\n  def f(x):\t\treturn x**2  # été Straße ΑΒΓ где мы "
    "你好，世界 1990年 こんにちは ١٢٣ 😀👍🏽 "
    "https://a.b/c?d=1 camelCaseWord HTTPServer \r\n \n   end!!!?? 3.14 ⅷ ''  "
)
FIRST = ("qwen2", "llama-bpe", "gpt-2", "smollm", "gpt-4o")  # names that are tried before the others


def metadata(tokenizer: Tokenizer, size: int) -> Entries:
    """Entries under "tokenizer.ggml.", of as many tokens as the embedding has rows. ValueError for a tokenizer that
    GGUF has no word for."""
    described = json.loads(tokenizer.backend.to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise ValueError(f"a tokenizer of kind {model['type']} is not written to GGUF here; those of merges (BPE) are")
    tokens, kinds = _tokens(tokenizer, described, size)
    found: Entries = {"token_type": kinds, "add_bos_token": _begins(tokenizer), "add_eos_token": False}
    if model.get("byte_fallback"):
        tokens = _spaced(tokens, kinds)
        scores = _scores(tokens, [_pair(each) for each in model["merges"]])
        prefix = _prefixes(described)
        return {"model": "llama", "tokens": tokens, "scores": scores, "add_space_prefix": prefix, **found}
    merges = [" ".join(_pair(each)) for each in model["merges"]]
    return {"model": "gpt2", "pre": words(tokenizer.backend), "tokens": tokens, "merges": merges, **found}


def words(backend: Any) -> str:
    """The name in GGUF of how this tokenizer cuts texts into words: one that cuts a text of many kinds alike."""
    from tokenizers import Regex, pre_tokenizers

    if backend.pre_tokenizer is None:
        raise ValueError("the tokenizer does not say how it cuts words, so GGUF has no name for it")
    want = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(PROBE)]
    for name in sorted(WORDS, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        if not WORDS[name].spelled:
            continue
        splits: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in WORDS[name].patterns]
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        if want == [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(PROBE)]:
            return name
    raise ValueError("the tokenizer cuts words in a way that llama.cpp has no name for; GGUF files cannot say it")


def _tokens(tokenizer: Tokenizer, described: Entries, size: int) -> tuple[list[str], list[int]]:
    """By their ids, and what they are; rows of the embedding that no token has are unused."""
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [int(TokenKind.UNUSED)] * size
    unknown = described["model"].get("unk_token")
    for text, number in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if number < size:
            byte = len(text) == 6 and text.startswith("<0x") and bool(described["model"].get("byte_fallback"))
            tokens[number], kinds[number] = text, int(TokenKind.BYTE if byte else TokenKind.NORMAL)
    for text, number in tokenizer.added.items():
        if number < size:
            kinds[number] = int(TokenKind.CONTROL if number in tokenizer.special_ids else TokenKind.USER_DEFINED)
            kinds[number] = int(TokenKind.UNKNOWN) if text == unknown else kinds[number]
    return tokens, kinds


def _spaced(tokens: list[str], kinds: list[int]) -> list[str]:
    """With SentencePiece's letter for spaces, where the tokenizer writes them as they are."""
    return [
        each.replace(" ", SPACE) if kind == TokenKind.NORMAL else each for each, kind in zip(tokens, kinds, strict=True)
    ]


def _scores(tokens: list[str], merges: list[tuple[str, str]]) -> list[float]:
    """Returns scores, less the place of the first merge that makes a token: what is merged first has the highest."""
    places: dict[str, int] = {}
    for place, pair in enumerate(merges):
        places.setdefault("".join(pair).replace(" ", SPACE), place)
    return [-float(places.get(each, len(merges))) for each in tokens]


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _prefixes(described: Entries) -> bool:
    """True if a text gets a space before it."""
    text = json.dumps([described.get("normalizer"), described.get("pre_tokenizer")])
    return '"Prepend"' in text or '"prepend_scheme": "first"' in text or '"prepend_scheme": "always"' in text


def _begins(tokenizer: Tokenizer) -> bool:
    first = tokenizer.encode("a")[:1]
    return bool(first) and first[0] == tokenizer.bos_id
