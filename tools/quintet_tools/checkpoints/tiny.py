"""Tiny random checkpoints of every family, made by transformers' own classes, which are also the reference."""

import contextlib
import functools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as talk

from quintet.conformance.harness.reference_model import LENGTH as LENGTH
from quintet.conformance.harness.reference_model import SERVED as SERVED
from quintet.conformance.harness.reference_model import VOCAB as VOCAB
from quintet.conformance.harness.reference_model import Tiny as Tiny
from quintet.hub.hf_config import read_config
from quintet.hub.resolve import load_model_config
from quintet_tools.checkpoints.added_families import added_families, drawn
from quintet_tools.checkpoints.custom_families import PUBLISHED, Published
from quintet_tools.checkpoints.derived_families import KIN
from quintet_tools.checkpoints.random_weights import scatter as scatter
from quintet_tools.checkpoints.sizes import CHUNKS as CHUNKS
from quintet_tools.checkpoints.sizes import DELTA, GRANITE_4, LATENT, LONG, SHORT_AND_LONG, SPACES, WINDOW
from quintet_tools.checkpoints.sizes import GEMMA as GEMMA
from quintet_tools.checkpoints.sizes import PLAIN as PLAIN
from quintet_tools.checkpoints.sizes import STREAMS as STREAMS

BIASED = {"attention_bias": True, "mlp_bias": True}
MIXED = {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN_MIXED = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 61, "head_dim": 16}
SHARED = {**QWEN_MIXED, "shared_expert_intermediate_size": 71}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what configs call them
OLMOE = {"num_experts": 8, "num_experts_per_tok": 3}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}

# family -> variant -> what its config is made of. Each has something that no other has: they go through every check, on
# every platform
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "plain": PLAIN,
        "tied, biased": {**PLAIN, "tie_word_embeddings": True, **BIASED, "head_dim": 10},
    },
    "mistral": {
        "window": {**PLAIN, "sliding_window": WINDOW},
        "no window": {**PLAIN, "sliding_window": None, "head_dim": 20},
    },
    "qwen2": {
        "plain": PLAIN,
        "windows": {**PLAIN, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        "tied": {**PLAIN, "tie_word_embeddings": True},
    },
    "qwen3": {
        "plain": {**PLAIN, "head_dim": 16},
        "windows": {
            **PLAIN,
            "head_dim": 6,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    },
    "gemma2": {"plain": GEMMA, "no caps": {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}},
    "gemma3_text": {
        "plain": {**GEMMA, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        "linear rope": {
            **GEMMA,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 20.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    },
    "phi3": {
        "plain": {**PLAIN, "sliding_window": WINDOW},
        "longrope": {**PLAIN, "rope_parameters": LONG, "original_max_position_embeddings": SERVED},
    },
    "phimoe": {
        "plain": {**PLAIN, **MIXED, "router_jitter_noise": 0.25},
        "longrope, biased": {
            **PLAIN,
            **MIXED,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": WINDOW,
            "rope_parameters": {
                **SHORT_AND_LONG,
                "original_max_position_embeddings": SERVED,
                "short_mscale": 1.2,
                "long_mscale": 1.4,
            },
        },
    },
    "gpt2": {
        "plain": {
            "vocab_size": VOCAB,
            "n_positions": LENGTH,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 6,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "scaled by depth": {
            "vocab_size": VOCAB,
            "n_positions": LENGTH,
            "n_embd": 40,
            "n_layer": 2,
            "n_head": 5,
            "n_inner": 51,
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    },
    "opt": {
        "norm before": {**PLAIN, "ffn_dim": 77, "tie_word_embeddings": True},
        "norm after, narrow": {
            **PLAIN,
            "ffn_dim": 50,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 20,
            "tie_word_embeddings": True,
        },
        "bare": {**PLAIN, "ffn_dim": 64, "enable_bias": False, "layer_norm_elementwise_affine": False},
    },
    "granite": {
        "plain": {
            **PLAIN,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
        "biased": {**PLAIN, "attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.3},
    },
    "mixtral": {
        "plain": {**PLAIN, **MIXED},
        "window, one expert each": {**PLAIN, **MIXED, "sliding_window": WINDOW, "num_experts_per_tok": 1},
    },
    "qwen3_moe": {
        "plain": {**PLAIN, **QWEN_MIXED, "norm_topk_prob": True},
        "some layers": {**PLAIN, **QWEN_MIXED, "decoder_sparse_step": 2, "attention_bias": True},
        "but one layer": {**PLAIN, **QWEN_MIXED, "mlp_only_layers": [1], "tie_word_embeddings": True},
    },
    "qwen3_next": {
        "plain": {
            **PLAIN,
            **DELTA,
            "num_hidden_layers": 4,
            "full_attention_interval": 2,
            "head_dim": 16,
            "num_experts": 0,
            "tie_word_embeddings": True,
        },
        "experts": {
            **PLAIN,
            **SHARED,
            **DELTA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 3,
        },
    },
    "qwen2_moe": {
        "plain": {**PLAIN, **SHARED, "norm_topk_prob": True},
        "some layers, windows": {
            **PLAIN,
            **SHARED,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    },
    "olmoe": {
        "plain": {**PLAIN, **OLMOE},
        "biased": {**PLAIN, **OLMOE, "norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 2},
    },
    "granitemoehybrid": {
        "plain": {**PLAIN, **SPACES, **GRANITE_4, "num_local_experts": 0},
        "experts": {**PLAIN, **SPACES, **GRANITE_4, "num_local_experts": 5, "position_embedding_type": "rope"},
    },
    "mamba": {"plain": {**PLAIN, "state_size": 5}},
    "mamba2": {
        "plain": {**PLAIN, "num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16},
    },
    "lfm2": {
        "plain": {**PLAIN, "layer_types": ["conv", "full_attention", "conv"]},
        "convolutions alone, biased": {
            **PLAIN,
            "layer_types": ["conv", "conv", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": True,
            "block_auto_adjust_ff_dim": False,
        },
    },
    "deepseek_v2": {
        "plain": {**PLAIN, **LATENT, "topk_method": "group_limited_greedy"},
        "no latent of q": {**PLAIN, **LATENT, "q_lora_rank": None, "topk_method": "greedy", "rope_parameters": YARN},
    },
    "deepseek_v3": {
        "plain": {**PLAIN, **LATENT, "rope_parameters": YARN},
        "one group, halves turned": {**PLAIN, **LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    },
    "gpt_oss": {
        "plain": {
            **PLAIN,
            **MIXED,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN, "truncate": False},
        }
    },
    "olmo2": {"plain": PLAIN, "biased": {**PLAIN, "attention_bias": True, "num_key_value_heads": 2}},
    "cohere2": {"plain": {**PLAIN, "sliding_window": WINDOW, "sliding_window_pattern": 2, "tie_word_embeddings": True}},
    "llama4_text": {
        "plain": {**PLAIN, **CHUNKS, "no_rope_layers": [1, 0, 1], "rope_parameters": {"rope_type": "default"}},
        "dense layers, no norms": {
            **PLAIN,
            **CHUNKS,
            "attention_chunk_size": 16,
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    },
    "gemma3n_text": {
        "plain": STREAMS,
        "three streams, none read": {
            **STREAMS,
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "attention_bias": True,
            "intermediate_size": [77, 40, 77, 61, 50],
        },
    },
    "smollm3": {
        "plain": {**PLAIN, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
        "windows": {
            **PLAIN,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "attention_bias": True,
        },
    },
}
# of mixtures with routing weights that jump where two are near: all experts, and each by itself
SMOOTH: dict[str, dict[str, Any]] = {
    "llama4_text": {"num_local_experts": 1},
    "phimoe": {"num_local_experts": 2, "router_jitter_noise": 0.0},
}
EVERY = {**FAMILIES, **KIN}
FILE = "model.safetensors"
VARIANTS = [(family, variant) for family, variants in FAMILIES.items() for variant in variants]


_FOLDER = tempfile.TemporaryDirectory(prefix="quintet-tiny-")  # goes when the process does


def folder_of_all() -> tempfile.TemporaryDirectory[str]:
    """Returns the folder of this process's checkpoints, one for all threads."""
    return _FOLDER


def make(family: str, settings: Mapping[str, Any], seed: int = 0) -> Tiny:
    """The checkpoint of these settings; the same one if it was made before."""
    return _make(family, json.dumps(settings), seed)


def variant(family: str, name: str) -> Tiny:
    return make(family, variants(family)[name])


def variants(family: str) -> Mapping[str, Mapping[str, Any]]:
    """Returns the settings of a family's small models; of one that a package adds, too."""
    return EVERY[family] if family in EVERY else added_families()[0][family].configs


def added_names() -> tuple[str, ...]:
    """Returns the model types that packages add beside these, where the kit can try them."""
    return tuple(kind for kind in added_families()[0] if kind not in EVERY)


def smooth(family: str) -> Tiny:
    """The first variant; of a mixture, with every expert for each token: a choice of some jumps where two are near."""
    settings = next(iter(variants(family).values()))
    if family in SMOOTH:
        return make(family, {**settings, **SMOOTH[family]})
    experts = next((settings[name] for name in EXPERTS if name in settings), None)
    if experts is None:
        return make(family, settings)
    groups = {"topk_group": settings["n_group"]} if "n_group" in settings else {}
    return make(family, {**settings, **groups, "num_experts_per_tok": experts})


@functools.lru_cache(maxsize=64)
def _make(family: str, settings: str, seed: int) -> Tiny:
    torch.set_num_threads(1)  # threads wait by spinning: on busy cores tiny products take 40 times as long with two
    own, said = PUBLISHED.get(family), json.loads(settings)
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(seed)
        model = _drawn(family, own, said)
        scatter(model)
        folder = Path(tempfile.mkdtemp(dir=folder_of_all().name))
        if own is not None and own.own is not None:
            save_file({name: each.contiguous() for name, each in model.state_dict().items()}, folder / FILE)
        else:
            model.save_pretrained(folder)
        if own is None:
            return Tiny(folder, _read_config(family, folder), model)
        file = folder / FILE
        save_file({name: each.contiguous() for name, each in own.tensors(load_file(file), said).items()}, file)
        (folder / "config.json").write_text(json.dumps(_entries(family, said)))
        return Tiny(folder, configured(family, said), own.computes(model, said))


def _drawn(family: str, own: Published | None, said: Mapping[str, Any]) -> Any:
    """The model that makes the numbers."""
    if own is not None and own.own is not None:
        return own.own(said).float().eval()
    if family not in EVERY and (added := added_families()[0].get(family)):
        return drawn(added, said)
    config = AutoConfig.for_model(own.like, **own.config(said)) if own else AutoConfig.for_model(family, **said)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_config(config, **plain).float().eval()


def _read_config(family: str, folder: Path) -> Any:
    """The config of a folder; of a family that a package adds as an engine reads it."""
    added = None if family in EVERY else added_families()[0].get(family)
    if added is None:
        return AutoConfig.from_pretrained(folder)
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    if added.architecture:
        file.write_text(json.dumps({**raw, "architectures": [added.architecture]}))
    return load_model_config(folder)


def _entries(family: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a config.json as it is published."""
    return {**settings, "model_type": family, "architectures": [PUBLISHED[family].architecture], "auto_map": {}}


def configured(family: str, settings: Mapping[str, Any]) -> Any:
    """The config of these settings, as it is read."""
    if family not in PUBLISHED:
        return AutoConfig.for_model(family, **settings)
    return read_config(family, _entries(family, settings), Path("config.json"))


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Neither bars nor advice from transformers: a report is being printed."""
    verbosity, bars = talk.get_verbosity(), talk.is_progress_bar_enabled()
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    try:
        yield
    finally:
        talk.set_verbosity(verbosity)
        if bars:
            talk.enable_progress_bar()
