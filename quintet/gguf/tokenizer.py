"""A vocabulary as a tokenizer: the same tokens as llama.cpp makes of a text, and the same text of tokens."""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quintet.gguf.pretokenizers import WORDS
from quintet.gguf.vocabulary import NAMED, TokenKind, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_LETTERS = 1024  # letters of a token that is cut in all its places; those of real vocabularies have 256 at most
SPACE = "\u2581"
# Letters of bytes that no UTF-8 has (C0, C1, F5 to FF) -> themselves in letters of bytes.
_AS_LETTER = {"À": "Ã\u0122", "Á": "Ã\u0123", **{each: f"Ã{chr(ord(each) - 0x40)}" for each in "õö÷øùúûüýþÿ"}}
LONGEST_WORD = 100  # characters that WordPiece looks at, as BERT's own tokenizer: what is longer is unknown


class BPEModel(NamedTuple):
    """Arguments of a tokenizer's BPE model."""

    tokens: Sequence[str]  # by their ids
    pairs: "array[int]"  # ids of the two tokens of each merge, one merge after the other
    parameters: dict[str, Any]  # the other arguments

    @property
    def merges(self) -> list[tuple[str, str]]:
        parts = map(self.tokens.__getitem__, self.pairs)
        return list(zip(parts, parts, strict=True))


def backend(vocabulary: Vocabulary) -> "Tokenizer":
    """The tokenizer itself. ValueError where its parts do not fit together."""
    return build(vocabulary)[0]


def build(vocabulary: Vocabulary) -> "tuple[Tokenizer, BPEModel | None]":
    """Returns the tokenizer, and what its BPE model was made of; None for other models. ValueError as backend()."""
    model: BPEModel | None = None
    try:
        if vocabulary.model in ("bert", "t5"):
            made = (_wordpiece if vocabulary.model == "bert" else _unigram)(vocabulary)
        else:
            made, model = (_spm if vocabulary.model == "llama" else _bpe)(vocabulary)
    except ValueError:
        raise
    except Exception as error:  # what tokenizers raises
        raise ValueError(f"its tokenizer cannot be built: {' '.join(str(error).split())[:200]}") from None
    _add(made, vocabulary)
    _frame(made, vocabulary)
    return made, model


def special_tokens(vocabulary: Vocabulary) -> dict[str, str]:
    """The tokens that have a name, as transformers calls them: "bos_token" -> "<s>"."""
    return {NAMED[name]: vocabulary.tokens[number] for name, number in vocabulary.special_ids.items()}


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _tokenizer(model: BPEModel) -> "Tokenizer":
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    return Tokenizer(BPE(_ids(model.tokens), model.merges, **model.parameters))


def _bpe(vocabulary: Vocabulary) -> "tuple[Tokenizer, BPEModel]":
    from tokenizers import Regex, normalizers, pre_tokenizers

    words, ids = WORDS[vocabulary.pre], _ids(vocabulary.tokens)
    pairs = _merges_by_score(vocabulary) if vocabulary.scores else array("I")
    for first, second in vocabulary.merges:
        if first in ids and second in ids and first + second in ids:
            pairs.extend((ids[first], ids[second]))
    model = BPEModel(vocabulary.tokens, pairs, {"ignore_merges": words.ignore_merges})
    splits: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in words.patterns]
    if words.spelled:
        made = _tokenizer(model)
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        made.decoder = _byte_decoder(vocabulary)
    else:
        pairs.extend(ids[part] for merge in _lines(ids, model.merges) for part in merge)
        model.parameters["byte_fallback"] = True
        made = _tokenizer(model)
        made.normalizer = normalizers.Replace(" ", SPACE)
        made.decoder = _unescaped(strip=False)
    made.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return made, model


def _byte_decoder(vocabulary: Vocabulary) -> Any:
    """Decoder of letters for bytes. A letter of a byte that UTF-8 never has, if a token by itself, means the letter."""
    from tokenizers import decoders

    own = {token for token, kind in vocabulary.pairs if kind == TokenKind.USER_DEFINED}
    meant: list[Any] = [decoders.Replace(each, _AS_LETTER[each]) for each in sorted(_AS_LETTER) if each in own]
    return decoders.Sequence([*meant, decoders.ByteLevel()]) if meant else decoders.ByteLevel()


def _lines(ids: dict[str, int], merges: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merges that make the tokens of runs of newlines, where a file has these alone: such a run is one token."""
    if any(not "".join(each).strip("\n") for each in merges):
        return []
    runs = sorted((token for token in ids if token and not token.strip("\n")), key=len)
    pairs = ((run[:cut], run[cut:]) for run in runs for cut in range(len(run) - 1, 0, -1))
    return [pair for pair in pairs if pair[0] in ids and pair[1] in ids]


def _spm(vocabulary: Vocabulary) -> "tuple[Tokenizer, BPEModel]":
    from tokenizers import normalizers

    unknown = vocabulary.special_ids.get("unknown")
    parameters: dict[str, Any] = {"fuse_unk": True, "byte_fallback": True}
    if unknown is not None:
        parameters["unk_token"] = vocabulary.tokens[unknown]
    model = BPEModel(vocabulary.tokens, _merges_by_score(vocabulary), parameters)
    made = _tokenizer(model)
    escape = normalizers.Replace(" ", SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape]) if vocabulary.add_space else escape
    made.decoder = _unescaped(strip=vocabulary.add_space)
    return made, model


def _merges_by_score(vocabulary: Vocabulary) -> "array[int]":
    """Pairs of tokens that make a third, the highest score first: what SPM merges, in its order."""
    find, scores, kinds = _ids(vocabulary.tokens).get, vocabulary.scores, vocabulary.kinds
    usual = (
        number for number, token in enumerate(vocabulary.tokens) if len(token) > 1 and kinds[number] != TokenKind.BYTE
    )
    pairs = array("I")
    for number in sorted(usual, key=lambda each: -scores[each]):
        token = vocabulary.tokens[number]
        if len(token) > MAX_LETTERS:
            raise ValueError(
                f"token {number} of the file has {len(token)} letters, and {MAX_LETTERS} are read; use another"
            )
        for cut in range(1, len(token)):
            first = find(token[:cut])
            if first is not None and (second := find(token[cut:])) is not None:
                pairs.append(first)
                pairs.append(second)
    return pairs


def _unescaped(strip: bool) -> Any:
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


def _wordpiece(vocabulary: Vocabulary) -> "Tokenizer":
    """Builds a WordPiece tokenizer. In the file, word beginnings have a space before them, continuations have none."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece

    ids = {_vocab_txt_token(token, kind): number for number, (token, kind) in enumerate(vocabulary.pairs)}
    if len(ids) < len(vocabulary.tokens):
        raise ValueError("its WordPiece vocabulary has tokens that differ by their marks alone; convert the model anew")
    unknown = vocabulary.tokens[vocabulary.special_ids["unknown"]] if "unknown" in vocabulary.special_ids else "[UNK]"
    made = Tokenizer(WordPiece(ids, unk_token=unknown, max_input_chars_per_word=LONGEST_WORD))
    made.normalizer = normalizers.BertNormalizer(strip_accents=vocabulary.strip_accents, lowercase=vocabulary.lowercase)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    return made


def _unigram(vocabulary: Vocabulary) -> "Tokenizer":
    """Builds XLM-RoBERTa's tokenizer: words between spaces, each with one before it. What the file states of spaces
    (add_space_prefix, remove_extra_whitespaces) is not used: some converted files have there what transformers does
    with spaces in decoding."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import Unigram

    if "unknown" not in vocabulary.special_ids:
        raise ValueError("its unigram vocabulary names no unknown token; convert the model anew")
    scored = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    made = Tokenizer(Unigram(scored, unk_id=vocabulary.special_ids["unknown"], byte_fallback=False))
    if vocabulary.charsmap:
        made.normalizer = normalizers.Precompiled(vocabulary.charsmap)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE)])
    made.decoder = decoders.Metaspace(SPACE)
    return made


def _vocab_txt_token(token: str, kind: int) -> str:
    """Returns the token as vocab.txt has it."""
    if kind not in (TokenKind.NORMAL, TokenKind.UNUSED) or (
        token.startswith("[") and token.endswith("]") and len(token) > 2
    ):
        return token
    return token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"


def _add(made: "Tokenizer", vocabulary: Vocabulary) -> None:
    """Tokens that stand for themselves in a text."""
    from tokenizers import AddedToken

    control, own = [], []
    mask = vocabulary.special_ids.get("mask") if vocabulary.model == "t5" else None
    for number, (token, kind) in enumerate(vocabulary.pairs):
        if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN):
            kept = not vocabulary.strips or token in ("<unk>", "<s>", "<|endoftext|>")
            control.append(AddedToken(token, special=True, normalized=False, lstrip=number == mask, rstrip=not kept))
        elif kind == TokenKind.USER_DEFINED:
            own.append(AddedToken(token, normalized=False, rstrip=vocabulary.strips))
    made.add_special_tokens(control)
    made.add_tokens(own)


def _frame(made: "Tokenizer", vocabulary: Vocabulary) -> None:
    """Adds the special tokens before and behind a text, and between two."""
    from tokenizers.processors import TemplateProcessing

    ends = "seperator" if vocabulary.model == "bert" else "eos"
    before = ["bos"] if vocabulary.add_bos else []
    behind = [ends] if vocabulary.add_eos else []
    if not before + behind:
        return
    first = [*(f"<{name}>:0" for name in before), "$A:0", *(f"<{name}>:0" for name in behind)]
    second, between = 0, [f"<{ends}>:0"]  # RoBERTa's
    if vocabulary.model == "bert":
        second, between = 1, []
    pair = [*first, *between, f"$B:{second}", *(f"<{name}>:{second}" for name in behind)]
    made.post_processor = TemplateProcessing(
        single=first,
        pair=pair if behind else None,
        special_tokens=[(f"<{name}>", vocabulary.special_ids[name]) for name in before + behind],
    )
