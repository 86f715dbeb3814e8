"""Tiny random encoders of every family, made by transformers' own classes, which are also the reference.

Families that it has no class for stand in nearest_encoders.py.
"""

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from quintet.hub.hf_config import read_config
from quintet_tools.checkpoints.custom_encoders import PUBLISHED_ENCODERS, TASKS
from quintet_tools.checkpoints.random_weights import scatter
from quintet_tools.checkpoints.tiny import FILE, VOCAB, Tiny, folder_of_all, hushed

PLACES = 64  # positions that the models are made for: with padding's, a step where shapes are fixed
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 77,
    "max_position_embeddings": PLACES + 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
MODERN = {**SMALL, "local_attention": 16, "cls_token_id": 0, "sep_token_id": 2, "global_attn_every_n_layers": 2}
DISTILLED = {
    "vocab_size": VOCAB, "dim": 48, "n_layers": 3, "n_heads": 6, "hidden_dim": 77, "max_position_embeddings": PLACES,
}  # fmt: skip
ALBERT = {**SMALL, "embedding_size": 32, "num_hidden_groups": 2, "inner_group_num": 2}
JINA = {**SMALL, "model_type": "bert", "type_vocab_size": 2, "position_embedding_type": "alibi"}
LATER = {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}
FLASH = {
    **SMALL, "model_type": "xlm-roberta", "type_vocab_size": 1, "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0, "lora_adaptations": list(TASKS), "lora_rank": 4, "lora_alpha": 2,
}  # fmt: skip
NOMIC_MOE: dict[str, Any] = {
    "model_type": "nomic_bert", "vocab_size": VOCAB, "n_embd": 48, "n_layer": 4, "n_head": 6, "n_inner": 77,
    "n_positions": PLACES + 2, "type_vocab_size": 2, "layer_norm_epsilon": 1e-5, "activation_function": "gelu",
    "rotary_emb_base": 1000.0, "num_experts": 4, "moe_top_k": 2, "moe_every_n_layers": 2, "pad_token_id": 1,
}  # fmt: skip
DEBERTA: dict[str, Any] = {**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
DEBERTA_V3 = {**DEBERTA, "position_buckets": 8, "position_biased_input": False, "norm_rel_ebd": "layer_norm"}
NEW = {**SMALL, "type_vocab_size": 2, "rope_theta": 500000.0, "position_embedding_type": "rope"}

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
    "mpnet": {"plain": SMALL},
    "deberta-v2": {
        "its own projections of distances": {**DEBERTA_V3, "type_vocab_size": 2},
        "the projections of queries and keys": {**DEBERTA_V3, "share_att_key": True},
        "a vector for each distance, of queries alone": {
            **DEBERTA,
            "pos_att_type": ["c2p"],
            "max_relative_positions": 16,
        },
        "of keys alone": {**DEBERTA, "pos_att_type": ["p2c"], "position_buckets": 8},
        "no distances": SMALL,
    },
    "deberta": {
        "plain": {**DEBERTA, "type_vocab_size": 2, "max_relative_positions": 16},
        "of keys alone": {**DEBERTA, "pos_att_type": ["p2c"], "position_biased_input": False},
        "no distances": SMALL,
    },
    "bert-generation": {"plain": SMALL},
    "megatron-bert": {"plain": SMALL},
    "roformer": {"narrow words": {**SMALL, "embedding_size": 32}, "plain": {**SMALL, "type_vocab_size": 1}},
    "rembert": {"narrow words": {**SMALL, "input_embedding_size": 32}},
    "squeezebert": {
        "groups": {
            **SMALL,
            "embedding_size": 48,
            "intermediate_size": 96,
            "q_groups": 4,
            "k_groups": 2,
            "v_groups": 1,
            "intermediate_groups": 4,
            "output_groups": 2,
        },
    },
    "clip_text_model": {"quick_gelu": SMALL, "gelu": {**SMALL, "hidden_act": "gelu"}},
    "siglip_text_model": {"plain": {**SMALL, "projection_size": 48}},
    "siglip2_text_model": {"plain": {**SMALL, "projection_size": 48}},
    "albert": {"groups": ALBERT, "wide words": {**SMALL, "embedding_size": 48}},
    "jina_bert": {
        "gated": {**JINA, "feed_forward_type": "geglu"},
        "q and k normed": {**JINA, "feed_forward_type": "reglu", "auto_map": LATER},
        "ungated": {**JINA, "feed_forward_type": "original"},
    },
    "nomic_bert_moe": {"plain": NOMIC_MOE, "each third layer": {**NOMIC_MOE, "moe_every_n_layers": 3, "n_layer": 5}},
    "new": {
        "stretched": {**NEW, "rope_scaling": {"type": "ntk", "factor": 2.0}},
        "stretched by a power": {**NEW, "rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}},
    },
    "xlm-roberta-flash": {"plain": FLASH, "another task": {**FLASH, "task": "retrieval.query"}},
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
    own, said = PUBLISHED_ENCODERS.get(family), json.loads(settings)
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(0)
        if own is None:
            model = _drawn(family, ending, said)
        else:
            model = _drawn(own.like, ending, own.config(_entries(said))) if own.own is None else own.own(said)
        model = model.float().eval()
        scatter(model)
        folder = Path(tempfile.mkdtemp(dir=folder_of_all().name))
        if own is None:
            model.save_pretrained(folder)
            return Tiny(folder, AutoConfig.from_pretrained(folder), model)
        tensors = own.tensors(dict(model.state_dict()), said)
        save_file({name: each.clone().contiguous() for name, each in tensors.items()}, folder / FILE)
        (folder / "config.json").write_text(json.dumps(_published(family, said)))
        return Tiny(folder, configured(family, said), own.computes(model, said))


def _drawn(family: str, ending: str, settings: Mapping[str, Any]) -> Any:
    """Returns a random model of transformers' class."""
    config = AutoConfig.for_model(family, **settings)
    stem = type(config).__name__.removesuffix("Config")
    kind = getattr(transformers, f"{stem}{ending}", None) or getattr(transformers, f"{stem}Encoder")
    config._attn_implementation = "eager"
    return kind(config)


def configured(family: str, settings: Mapping[str, Any]) -> Any:
    """The config of these settings, as it is read."""
    if family not in PUBLISHED_ENCODERS:
        return AutoConfig.for_model(family, **settings)
    entries = _published(family, settings)
    return read_config(entries["model_type"], entries, Path("config.json"))


def _published(family: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a config.json as it is published; its model_type may be another family's."""
    return {"model_type": family, "architectures": [PUBLISHED_ENCODERS[family].architecture], **settings}


def _entries(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings without model_type."""
    return {name: value for name, value in settings.items() if name != "model_type"}


@torch.no_grad()
def hidden(model: Any, ids: Sequence[int], segments: Sequence[int] | None = None) -> Tensor:
    """[T, H], one text alone, as transformers' trunk gives it."""
    more = {} if segments is None else {"token_type_ids": torch.tensor([list(segments)])}
    states: Tensor = model(torch.tensor([list(ids)]), **more).last_hidden_state[0]
    return states.float()
