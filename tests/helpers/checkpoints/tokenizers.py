"""Tokenizers of the two common kinds, trained on the spot and saved as a model's folder has them; the same each time.

The trainers break some ties by chance: of characters that are equally rare if an alphabet is limited, and, where words
are put together of pieces, of pieces that are equally good.
"""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from quintet.tokenizers.tokenizer import Tokenizer, load_tokenizer

CORPUS = ["The quick brown fox jumps over the lazy dog.", "Hello world, hello there! 1 2 3", "été naïve 你好 👋🏽"] * 20
GIVES_UP = "a" * 5000 + "b"
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_level(folder: Path, add_bos: bool = True, template: str | None = TEMPLATE) -> Tokenizer:
    """As GPT-2 and Llama 3."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _save(backend, folder, add_bos, template)


def giving_up(folder: Path) -> Tokenizer:
    """With a regular expression that tries for ever on some texts, such as GIVES_UP: tokenizers then panics."""
    byte_level(folder)
    described = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, described["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return load_tokenizer(folder)


def byte_fallback(folder: Path, add_bos: bool = True, template: str | None = TEMPLATE) -> Tokenizer:
    """As Llama 2: a space is "▁", one stands before every text, bytes stand in for 你, 好, 👋 and 🏽."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=len(set("".join(CORPUS))) - 4,
        show_progress=False,
    )
    latin = [text.encode("latin-1", "ignore").decode("latin-1") for text in CORPUS]
    backend.train_from_iterator([*CORPUS, *latin], trainer)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(_without_special_bytes(backend), folder, add_bos, template)


def metaspace(folder: Path, add_bos: bool = False, template: str | None = None) -> Tokenizer:
    """As T5 and the first sentencepiece conversions: a Metaspace decoder."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    )
    return _save(backend, folder, add_bos, template)


def word_piece(folder: Path) -> Tokenizer:
    """A decoder that nobody reads token by token."""
    words = sorted(set(re.findall(r"\w+|[^\w\s]+", " ".join(CORPUS))))
    letters = sorted(set("".join(words)))
    pieces = dict.fromkeys(["<unk>", *SPECIAL, *letters, *(f"##{letter}" for letter in letters), *words])
    backend = Backend(models.WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["<unk>", *SPECIAL])
    return _save(backend, folder, False, None)


def _without_special_bytes(backend: Backend) -> Backend:
    """The trainer wants byte tokens among the special ones; a real tokenizer has them in the vocabulary alone."""
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    return Backend.from_str(json.dumps(state))


def _save(backend: Backend, folder: Path, add_bos: bool, template: str | None) -> Tokenizer:
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    if add_bos:
        bos = backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
        )
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    hf.chat_template = template
    hf.save_pretrained(folder)
    return load_tokenizer(folder)
