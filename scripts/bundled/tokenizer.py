"""The tokenizer: BPE with byte fallback, one token per digit, and words without their spaces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
CONTROL = ("<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
# Not `special`: a reader of the decoded text must see them.
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
PRINTABLE = ["\n", *map(chr, range(32, 127))]
# Words hold no space, so a word that is copied is the same token wherever it stands.
PIECES = r"\p{L}+|\d|[^\p{L}\d]+"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


@dataclass(frozen=True)
class Form:
    """Sizes and names of a tokenizer."""

    vocab_size: int = VOCAB_SIZE
    pieces: str = PIECES  # regular expression of what merges stay within
    control: tuple[str, ...] = CONTROL
    template: Path = TEMPLATE

    def split(self) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Split(Regex(self.pieces), "isolated")


def learn_merges(texts: Iterable[str], size: int, form: Form) -> tuple[list[str], list[tuple[str, str]]]:
    """The learnt vocabulary in order of age, and its merges."""
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = form.split()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=PRINTABLE,
        limit_alphabet=len(PRINTABLE),
        show_progress=False,
        max_token_length=14,
    )
    draft.train_from_iterator(texts, trainer)
    model = json.loads(draft.to_str())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].get)
    return vocab, [tuple(merge) for merge in model["merges"]]


def build(texts: Iterable[str], form: Form = Form()) -> PreTrainedTokenizerFast:
    """Control tokens first, then the 256 bytes, then what was learnt; nothing normalises, so every text comes back."""
    reserved = (*form.control, *MARKS, *BYTES)
    learnt, merges = learn_merges(texts, form.vocab_size - len(reserved), form)
    vocab = {token: index for index, token in enumerate((*reserved, *learnt))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=False))
    tokenizer.pre_tokenizer = form.split()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", vocab["<s>"])]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in form.control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=form.template.read_text(),
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
    )
