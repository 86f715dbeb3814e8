"""Text to token ids and back, exactly as transformers does it, and what the engine asks about a vocabulary."""

import functools
import importlib.util
import logging
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quintet.common.distribution import install_hint
from quintet.common.file_digests import file_identity
from quintet.common.free_memory import release_free_memory
from quintet.common.imports import without_garbage_collection
from quintet.common.json_files import read_object
from quintet.gguf.tokenizer import BPEModel
from quintet.hub import transformers_cache as readings
from quintet.model_loader.mistral_format import TEKKEN
from quintet.tokenizers.compact import compact, compact_model, restore
from quintet.tokenizers.load_errors import converters, load_error, one_line, panic_as_value_error, without_json
from quintet.tokenizers.token_bytes import TokenBytes

logger = logging.getLogger(__name__)

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
_OTHERS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".md")  # weights, and what is written of them
GGUF_FORMAT = 4  # of readings made of GGUF files: raised with any change of how a vocabulary becomes a tokenizer
_LONG = 2000  # characters or token ids; below, handing them to another thread costs more than they do
_SURROGATE = re.compile("[\ud800-\udfff]")


PROCESSOR_TEMPLATE = "chat_template.json"  # of a multimodal model's processor, before transformers 5


class Tokenizer:
    """A fast tokenizer as transformers loads it: the backend, the tokens that have a name, and the chat templates.

    `load` makes transformers' own object, for those who want it.
    """

    def __init__(
        self,
        backend: Any,
        named: Mapping[str, str],
        chat_template: str | dict[str, str] | None,
        load: Callable[[], Any],
    ) -> None:
        self.backend = _without_truncation(backend)
        self.pieces = TokenBytes.read(self.backend)
        self.special_tokens: dict[str, Any] = dict(named)  # "bos_token" -> "<s>", for chat templates
        self.bos_token: str | None = named.get("bos_token")
        self.bos_id: int | None = None if self.bos_token is None else self.token_id(self.bos_token)
        eos = named.get("eos_token")
        eos_id = None if eos is None else self.token_id(eos)
        self.eos_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added: dict[str, int] = {token.content: token_id for token_id, token in added.items()}  # text -> id
        self.chat_template = _template(chat_template)
        self._single_bos = True
        self._load = load

    @classmethod
    def from_transformers(cls, hf: Any) -> "Tokenizer":
        """Wraps transformers' tokenizer."""
        return cls(hf.backend_tokenizer, hf.special_tokens_map, hf.chat_template, lambda: hf)

    @functools.cached_property
    def hf(self) -> Any:
        """transformers' own object, loaded when it is first asked for."""
        loaded = self._load()
        _without_truncation(loaded.backend_tokenizer)
        return loaded

    @property
    def templates(self) -> str:
        """All its chat templates, to look for words in; empty if it has none."""
        own = self.chat_template
        return "\n".join(own.values()) if isinstance(own, dict) else own or ""

    def __len__(self) -> int:
        """Number of tokens, added ones included; ids may have gaps, see vocab_size."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._extent[0]

    @property
    def max_chars_per_token(self) -> int | None:
        """No token stands for more characters, so a longer text than this times a limit in tokens cannot fit.

        None if there is no bound: the unknown token may stand for a text of any length. Whitespace that the
        tokenizer itself drops is not counted.
        """
        model = self.backend.model
        byte_level = self.pieces is not None and self.pieces.is_byte_level
        if getattr(model, "unk_token", None) and not getattr(model, "byte_fallback", False) and not byte_level:
            return None
        return self._extent[1]

    @functools.cached_property
    def _extent(self) -> tuple[int, int]:
        """One more than the largest id, and the characters of the longest token. Tokens are read one by one: a copy of
        the vocabulary takes 60 MiB with 260k tokens, which the C library keeps."""
        size = len(self)
        try:
            return size, max((len(self.backend.id_to_token(token_id)) for token_id in range(size)), default=1)
        except TypeError:  # no token has this id: there are gaps
            ids = self.backend.get_vocab(with_added_tokens=True)
            return max(ids.values()) + 1, max(map(len, ids))

    def for_pooling(self, lowercase: bool) -> None:
        """Sets the tokenizer up for a pooling model: each text has the ids that transformers gives it, also one that
        begins with the text of the BOS. `lowercase`: as do_lower_case of Sentence Transformers."""
        from tokenizers import normalizers

        self._single_bos = False
        if lowercase:
            behind = [] if self.backend.normalizer is None else [self.backend.normalizer]
            self.backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *behind])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text. In a prompt that text is generated for there is one BOS: if it begins with the BOS, it brings
        its special tokens itself (a rendered chat)."""
        if self._single_bos and self.bos_token and text.startswith(self.bos_token):
            add_special_tokens = False
        return self._encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encodes many texts together, which costs less."""
        begins = self._single_bos and self.bos_token and any(text.startswith(self.bos_token) for text in texts)
        if add_special_tokens and begins:
            return [self.encode(text) for text in texts]
        return self._encode_all(texts, add_special_tokens)

    def _encode_all(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Long ones as a batch, whatever their number: that alone lets go of the interpreter's lock, and keeps no
        offsets, which cost most of the time."""
        try:
            with panic_as_value_error("encode this text"):
                if sum(map(len, texts)) < _LONG:
                    return [self.backend.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]
                encoded = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
                return [each.ids for each in encoded]
        except (UnicodeEncodeError, TypeError):
            for text in texts:
                refuse_surrogates(text)
            raise

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        with panic_as_value_error("decode these tokens"):
            if len(ids) < _LONG:
                return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
            [text] = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)  # as above
            return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns what the token adds within a text; for a part of a character, its bytes."""
        if self.pieces is not None:
            return self.pieces[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Returns the token as text: a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that write the words, at the start of a text and after a space."""
        variants: list[str] = []
        for word in words:
            bare = word.lstrip()
            if not bare:
                raise ValueError(f"bad_words: {word!r} has no visible character; leave it out")
            variants += bare, " " + bare
        sequences = dict.fromkeys(map(tuple, self._encode_all(variants, add_special_tokens=False)))
        sequences.pop((), None)
        return tuple(sequences)


def _template(value: Any) -> str | dict[str, str] | None:
    """A chat template, or several by name."""
    each = value.values() if isinstance(value, dict) else [value]
    if value is not None and not all(isinstance(template, str) for template in each):
        raise ValueError(
            f"the tokenizer's chat_template is {reprlib.repr(value)}, neither text nor texts by name; correct "
            "tokenizer_config.json"
        )
    return value


def _without_truncation(backend: Any) -> Any:
    """Either may be switched on in tokenizer.json, and would cut texts or fill them up."""
    backend.no_truncation()
    backend.no_padding()
    return backend


def load_tokenizer(path: str | Path, revision: str | None = None) -> Tokenizer:
    """Loads a tokenizer from a folder, a GGUF file, or a hub id (the hub's cache or the hub). Runs no code from there.

    Raises ValueError that says which files are missing or damaged.
    """
    try:
        return _load_tokenizer(path, revision)
    finally:
        release_free_memory()  # what it was built of


def _load_tokenizer(path: str | Path, revision: str | None) -> Tokenizer:
    folder = Path(path)
    if folder.is_file():
        return _load_tekken(folder) if folder.name == TEKKEN else _load_gguf(folder)
    if (folder / TEKKEN).is_file() and not any((folder / name).is_file() for name in _FILES):
        return _load_tekken(folder / TEKKEN)
    if folder.is_dir() and not any((folder / name).is_file() for name in _FILES):
        raise ValueError(f"{folder} holds no tokenizer: none of {', '.join(_FILES)}; copy them from the model's source")
    load = functools.partial(_by_transformers, path, revision)
    if not folder.is_dir():
        return Tokenizer.from_transformers(load())
    if (
        not any((folder / each).is_file() for each in ("tokenizer.json", "vocab.json", "vocab.txt"))
        and not converters()
    ):
        raise ValueError(without_json(folder, "neither sentencepiece nor tiktoken is installed"))
    name = readings.digest("tokenizer", contents(folder))
    if (kept := readings.find(name, lambda reading: _thaw(reading, folder, load))) is not None:
        return kept
    hf = load()
    tokenizer = Tokenizer.from_transformers(hf)
    if type(hf).__module__.startswith("transformers."):  # another package's class may change without transformers
        reading = freeze(tokenizer, folder)
        if reading is not None:
            readings.store(name, reading)
    return tokenizer


def _load_tekken(file: Path) -> Tokenizer:
    """Reads Mistral's tekken.json; without mistral-common the tokenizer has no chat template."""
    try:
        from transformers.integrations.mistral import convert_tekken_tokenizer
    except ImportError as error:
        raise ValueError(f"{file}: transformers reads no tekken.json yet ({one_line(error)}); upgrade it") from None
    if importlib.util.find_spec("mistral_common") is None:
        logger.info("%s: without mistral-common it has no chat template: %s", file, install_hint("mistral"))
    try:
        with panic_as_value_error("be made of its description"):
            return Tokenizer.from_transformers(convert_tekken_tokenizer(str(file)))
    except Exception as error:  # what a damaged file does to transformers
        raise ValueError(f"{file} cannot be read ({one_line(error)}); fetch it again") from error


def is_missing_in_cache(file: Path) -> bool:
    """Returns whether the cache lacks the tokenizer of a GGUF file, and could keep it."""
    return readings.is_worth_making(_gguf_reading(file))


def _gguf_reading(file: Path) -> str:
    return readings.digest(f"GGUF tokenizer {GGUF_FORMAT}", [file_identity(file)])


def _load_gguf(file: Path) -> Tokenizer:
    name, load = _gguf_reading(file), functools.partial(_wrapped, file)
    find = functools.partial(readings.find, name, lambda reading: _thaw(reading, file, load))
    if (kept := find()) is not None:
        return kept
    with readings.making(name), without_garbage_collection():  # which would walk each merge several times
        if (kept := find()) is not None:  # another process has made it
            return kept
        backend, named, template, model = _read_gguf(file)
        tokenizer = Tokenizer(backend, named, template, load)
        if (reading := freeze(tokenizer, file, model)) is not None:
            readings.store(name, reading)
    return tokenizer


def _read_gguf(file: Path) -> tuple[Any, dict[str, str], str | dict[str, str] | None, BPEModel | None]:
    """The backend, the tokens that have a name, the chat templates, and the arguments of a BPE model."""
    from quintet.gguf import defaults, tokenizer, vocabulary
    from quintet.gguf.file import read_metadata

    metadata = read_metadata(file)
    try:
        settings = vocabulary.read_vocabulary(metadata)
        with panic_as_value_error("be built"):
            backend, model = tokenizer.build(settings)
        return backend, tokenizer.special_tokens(settings), defaults.templates(metadata), model
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _wrapped(file: Path) -> Any:
    """Builds transformers' tokenizer from a GGUF file."""
    from transformers import PreTrainedTokenizerFast

    made, names, template, _ = _read_gguf(file)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template, clean_up_tokenization_spaces=False, **names
    )


def contents(folder: Path) -> Iterator[bytes]:
    """The names and contents of all that a tokenizer may be made of; of what is too large for that, when it changed."""
    for file in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
        if file.is_file() and file.suffix not in _OTHERS:
            yield file.relative_to(folder).as_posix().encode()
            state = file.stat()
            large = state.st_size > readings.MAX_BYTES or not os.access(file, os.R_OK)
            yield f"{state.st_size} {state.st_mtime_ns}".encode() if large else file.read_bytes()


def freeze(tokenizer: Tokenizer, folder: Path, model: BPEModel | None = None) -> dict[str, Any] | None:
    """The reading; None where the backend calls Python code, which has no form as JSON. `model`: arguments of its BPE
    model, where they are known."""
    try:
        form = _described(tokenizer, folder) if model is None else compact_model(tokenizer.backend, model)
    except Exception as error:  # tokenizers has no class for it
        logger.info("the tokenizer in %s has no form as JSON (%s); each start imports transformers", folder, error)
        return None
    return {
        "backend": form,
        "splits_special_tokens": tokenizer.backend.encode_special_tokens,  # which is not in the description
        "named": tokenizer.special_tokens,
        "chat_template": tokenizer.chat_template,
    }


def _described(tokenizer: Tokenizer, folder: Path) -> Any:
    described = tokenizer.backend.to_str()
    return None if _matches_file(described, folder) else compact(described) or described


def _matches_file(described: str, folder: Path) -> bool:
    """Returns whether tokenizer.json describes the same tokenizer, which need then not be kept a second time."""
    try:
        return (
            str(_without_truncation(_backend((folder / "tokenizer.json").read_text(encoding="utf-8"))).to_str())
            == described
        )
    except (OSError, ValueError):
        return False


def _thaw(reading: Mapping[str, Any], folder: Path, load: Callable[[], Any]) -> Tokenizer:
    described = reading["backend"]
    if isinstance(described, dict):
        backend = _build(restore, described)
    else:
        backend = _backend((folder / "tokenizer.json").read_text(encoding="utf-8") if described is None else described)
    backend.encode_special_tokens = reading["splits_special_tokens"]
    return Tokenizer(backend, reading["named"], reading["chat_template"], load)


def _backend(described: str) -> Any:
    from tokenizers import Tokenizer as Backend

    return _build(Backend.from_str, described)


def _build(build: Callable[[Any], Any], described: Any) -> Any:
    try:
        with panic_as_value_error("be made of its description"):
            return build(described)
    except Exception as error:  # what tokenizers raises for a damaged description
        raise ValueError(str(error)) from error


def _by_transformers(path: str | Path, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    try:
        with panic_as_value_error("be loaded"):
            hf = AutoTokenizer.from_pretrained(str(path), revision=revision, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        raise ValueError(load_error(Path(path), error)) from error
    if not getattr(hf, "is_fast", False):
        raise ValueError(
            f"the tokenizer of {path} ({type(hf).__name__}) has no fast form; convert it: "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained(...) must write a tokenizer.json"
        )
    if not hf.chat_template and (file := Path(path) / PROCESSOR_TEMPLATE).is_file():
        hf.chat_template = read_object(file).get("chat_template")
    return hf


def refuse_surrogates(text: str, what: str = "the text") -> None:
    """A lone surrogate (half of a UTF-16 pair) is no Unicode character, so no tokenizer can encode it."""
    if match := _SURROGATE.search(text):
        raise ValueError(
            f"{what} has a lone surrogate, U+{ord(match[0]):04X}, at character {match.start()}: "
            "it is not valid Unicode; replace it or decode the text anew"
        )
