"""Tiny random encoders of every family, made by transformers' own classes, which are also the reference."""

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

from quintet.conformance.scattered import scatter
from quintet.conformance.sizes import VOCAB
from quintet.conformance.tiny import Tiny, folder_of_all, hushed

PLACES = 64  # positions that the models are made for: with padding's, a step where shapes are fixed
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 77,
    "max_position_embeddings": PLACES + 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
MODERN = {**SMALL, "local_attention": 16, "cls_token_id": 0, "sep_token_id": 2, "global_attn_every_n_layers": 2}
DISTILLED = {
    "vocab_size": VOCAB, "dim": 48, "n_layers": 3, "n_heads": 6, "hidden_dim": 77, "max_position_embeddings": PLACES,
}  # fmt: skip

# family -> variant -> what its config is made of; the first has segments, where the family has any
ENCODERS: dict[str, dict[str, dict[str, Any]]] = {
    "bert": {"plain": SMALL, "one segment, relu": {**SMALL, "type_vocab_size": 1, "hidden_act": "relu"}},
    "roberta": {"plain": {**SMALL, "type_vocab_size": 2}},
    "xlm-roberta": {"plain": {**SMALL, "type_vocab_size": 1}},
    "camembert": {"plain": {**SMALL, "type_vocab_size": 1}},
    "distilbert": {"plain": DISTILLED},
    "electra": {"narrow words": {**SMALL, "embedding_size": 32}, "plain": {**SMALL, "embedding_size": 48}},
    "nomic_bert": {"plain": SMALL},
    "gte": {"plain": {**SMALL, "type_vocab_size": 2}},
    "jina_embeddings_v3": {"plain": SMALL},
    "modernbert": {
        "plain": MODERN,
        "biased": {**MODERN, "attention_bias": True, "mlp_bias": True, "norm_bias": True},
    },
}


def encoder(family: str, name: str) -> Tiny:
    """The trunk, as its AutoModel class has it."""
    return made(family, "Model", ENCODERS[family][name])


def first(family: str) -> Tiny:
    """Its first variant."""
    return encoder(family, next(iter(ENCODERS[family])))


def made(family: str, ending: str, settings: Mapping[str, Any]) -> Tiny:
    """The checkpoint of transformers' class for the family with this ending; the same one if it was made before."""
    return _made(family, ending, json.dumps(settings))


@functools.lru_cache(maxsize=64)
def _made(family: str, ending: str, settings: str) -> Tiny:
    torch.set_num_threads(1)  # see tiny.make
    config = AutoConfig.for_model(family, **json.loads(settings))
    kind = getattr(transformers, f"{type(config).__name__.removesuffix('Config')}{ending}")
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(0)
        config._attn_implementation = "eager"
        model = kind(config).float().eval()
        scatter(model)
        folder = Path(tempfile.mkdtemp(dir=folder_of_all().name))
        model.save_pretrained(folder)
        return Tiny(folder, AutoConfig.from_pretrained(folder), model)


@torch.no_grad()
def hidden(model: Any, ids: Sequence[int], segments: Sequence[int] | None = None) -> Tensor:
    """[T, H], one text alone, as transformers' trunk gives it."""
    more = {} if segments is None else {"token_type_ids": torch.tensor([list(segments)])}
    states: Tensor = model(torch.tensor([list(ids)]), **more).last_hidden_state[0]
    return states.float()
