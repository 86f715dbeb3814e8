"""The small model: a tokenizer of its own, a BERT of two layers, and the folder that Sentence Transformers reads."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = 17000
WIDTH, LAYERS, HEADS = 128, 2, 2
LONGEST = 256  # tokens
ENDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def tokenizer_of(texts: Iterable[str], teacher: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The teacher's WordPiece with the tokens that the texts have most, and all of single characters."""
    counts = Counter(token for ids in teacher(list(texts), add_special_tokens=False)["input_ids"] for token in ids)
    names = {place: token for token, place in teacher.get_vocab().items()}
    for place in teacher.all_special_ids:
        counts.pop(place, None)
    single = {place for place, name in names.items() if len(name.removeprefix("##")) == 1 and place in counts}
    common = [place for place, _ in sorted(counts.items(), key=lambda each: (-each[1], each[0]))]
    chosen = list(dict.fromkeys([*sorted(single), *common]))[: WORDS - len(ENDS)]
    vocabulary = {token: place for place, token in enumerate([*ENDS, *(names[each] for each in sorted(chosen))])}
    words = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    words.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=LONGEST,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in zip(("pad", "unk", "cls", "sep", "mask"), ENDS, strict=True)},
    )


def model_of(tokenizer: PreTrainedTokenizerFast) -> BertModel:
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LONGEST,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
    )
    return BertModel(config, add_pooling_layer=False)


def opened(folder: Path) -> BertModel:
    return BertModel.from_pretrained(folder, add_pooling_layer=False)


def pooled(model: BertModel, ids: torch.Tensor, mask: torch.Tensor, first: int = 0) -> torch.Tensor:
    """[texts, WIDTH] of length 1. The first token has the place `first`."""
    places = torch.arange(first, first + ids.shape[1]).unsqueeze(0)
    hidden = model(input_ids=ids, attention_mask=mask, position_ids=places).last_hidden_state
    weights = mask.unsqueeze(-1).float()
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


MODULES = ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")
POOLING = {
    "word_embedding_dimension": WIDTH,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
}


def save(model: BertModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Weights in float16, to be computed in float32, and what Sentence Transformers reads beside them. Written beside
    the folder and moved file by file, so that a reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        half = BertModel(model.config, add_pooling_layer=False).half()
        half.load_state_dict(model.state_dict())
        half.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        config, words, named = (
            json.loads(Path(scratch, name).read_text(encoding="utf-8"))
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
        )
        modules = [
            {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{name}"}
            for at, (path, name) in enumerate(MODULES)
        ]
        for path in Path(scratch).glob("*.safetensors"):
            os.replace(path, folder / path.name)
        _write(folder / "config.json", {**config, "dtype": "float32"})
        _write(folder / "tokenizer.json", {**words, "truncation": None}, small=True)  # what reads it sets its own
        # the class name that every version of transformers knows
        _write(folder / "tokenizer_config.json", {**named, "tokenizer_class": "PreTrainedTokenizerFast"})
        _write(folder / "modules.json", modules)
        _write(folder / "sentence_bert_config.json", {"max_seq_length": LONGEST, "do_lower_case": False})
        _write(folder / "1_Pooling" / "config.json", POOLING)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _write(file: Path, content: object, small: bool = False) -> None:
    """JSON; `small` without line breaks, which are a quarter of a tokenizer."""
    file.parent.mkdir(exist_ok=True)
    layout = {"separators": (",", ":")} if small else {"indent": 2}
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(content, ensure_ascii=False, **layout) + "\n", encoding="utf-8")
    os.replace(part, file)
