"""Random-weight checkpoints of real shapes, made on the spot: what a step costs does not depend on the weights."""

import itertools
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent / "checkpoints"


def _places(layers: int, attention: tuple[int, ...], others: str) -> list[str]:
    """The kind of each layer."""
    return ["full_attention" if layer in attention else others for layer in range(layers)]


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    # A tenth of a billion: steps of milliseconds, so that what is measured in turn is measured at nearly the same time.
    "qwen3-0.1b": {
        "model_type": "qwen3",
        "vocab_size": 32768,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 40960,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 500_000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    # Three of the 48 layers, and a short vocabulary: the experts are what is measured.
    "qwen3-30b-a3b-3-layers": {
        "model_type": "qwen3_moe",
        "vocab_size": 32768,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "granite-4-h-1b": {
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "shared_intermediate_size": 4096,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 40,
        "layer_types": _places(40, (5, 15, 25, 35), "linear_attention"),
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "embedding_multiplier": 12,
        "attention_multiplier": 0.0078125,
        "residual_multiplier": 0.22,
        "logits_scaling": 6,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 12288,  # two thirds of it are computed
        "num_hidden_layers": 16,
        "layer_types": _places(16, (2, 5, 8, 10, 12, 14), "conv"),
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "max_position_embeddings": 128000,
        "rope_theta": 1_000_000,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    # Four of the 32 layers, three with the delta rule and one with attention, and a short vocabulary.
    "qwen3.5-9b-4-layers": {
        "model_type": "qwen3_5_text",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 4,
        "layer_types": _places(4, (3,), "linear_attention"),
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "mamba-130m": {
        "model_type": "mamba",
        "vocab_size": 50280,
        "hidden_size": 768,
        "intermediate_size": 1536,
        "state_size": 16,
        "time_step_rank": 48,
        "num_hidden_layers": 24,
        "tie_word_embeddings": True,
    },
    # Three of the 27 layers, the dense one first; a short vocabulary: its head still takes a fifth of a step.
    "deepseek-v2-lite-3-layers": {
        "model_type": "deepseek_v2",
        "vocab_size": 32768,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 16384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    # Six of the 26 layers, five with windows and one that sees all, and as much less of the 262,144 tokens.
    "gemma-3-1b-6-layers": {
        "model_type": "gemma3_text",
        "vocab_size": 65536,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 65536,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000},
        },
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}


def checkpoint(name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """The folder of that shape's checkpoint; made at the first call, kept for the next."""
    folder = HERE / name
    if not (folder / "model.safetensors").is_file():
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = dict(SHAPES[name])
        config = AutoConfig.for_model(shape.pop("model_type"), **shape)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, max_shard_size="100GB")
    return folder


CYCLE = 48  # tokens that a copying model says in turn


def copying(name: str) -> Path:
    """That shape with weights that copy: after each token comes the next of its CYCLE tokens, whatever stood before.

    What the layers compute counts for a thousandth: a step costs what it costs, and the head knows the next token.
    """
    folder = HERE / f"{name}-copying"
    if not (folder / "model.safetensors").is_file():
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = {**SHAPES[name], "tie_word_embeddings": False}
        config = AutoConfig.for_model(shape.pop("model_type"), **shape)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.mul_(1e-3)
                layer.mlp.down_proj.weight.mul_(1e-3)
            token = torch.arange(config.vocab_size)
            before = torch.where(token % CYCLE == 0, token + CYCLE - 1, token - 1).clamp(max=config.vocab_size - 1)
            model.lm_head.weight.copy_(model.model.embed_tokens.weight[before])
        model.save_pretrained(folder, max_shard_size="100GB")
    return folder


def with_tokenizer(folder: Path) -> Path:
    """The checkpoint with a byte-level tokenizer of its vocabulary's size; its pieces mean nothing."""
    if not (folder / "tokenizer.json").is_file():
        import json

        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = itertools.chain.from_iterable(itertools.product(letters, repeat=length) for length in (1, 2, 3))
        vocab = {"".join(piece): place for place, piece in enumerate(itertools.islice(made, size))}
        tokenizer = Tokenizer(models.BPE(vocab, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def small(folder: Path, vocab_size: int = 1024) -> Path:
    """A folder with the configuration of a tiny model and no weights, for runs that need none."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=vocab_size, num_key_value_heads=2, max_position_embeddings=8192, **sizes)
    config.save_pretrained(folder)
    return folder
