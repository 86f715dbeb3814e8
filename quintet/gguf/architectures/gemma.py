"""Gemma's families: norms multiply by 1 + w, which the files hold."""

from collections.abc import Mapping

from quintet.gguf.architectures.architecture import Architecture, Entries
from quintet.gguf.architectures.rope import rope
from quintet.gguf.architectures.tables import GEMMA, LLAMA
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames


def _gemma(model: GGUFModel) -> Entries:
    return {"rope_parameters": rope(model)}


def _gemma2(model: GGUFModel) -> Entries:
    return {
        "rope_parameters": rope(model),
        "query_pre_attn_scalar": _query_scale(model, 46),
        "sliding_window": model.required_number("attention.sliding_window", 4096),
        "attn_logit_softcapping": model.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
    }


def _gemma3(model: GGUFModel) -> Entries:
    local = model.number("rope.freq_base_swa", 10000.0)
    window, capped = model.window, model.get("final_logit_softcapping")
    kinds = ["full_attention" if not window or not (i + 1) % 6 else "sliding_attention" for i in range(model.layers)]
    return {
        "rope_parameters": {
            "full_attention": rope(model, base=1e6),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": _query_scale(model, 62),
        "layer_types": kinds,
        "sliding_window": window or 4096,
        "final_logit_softcapping": None if capped is None else model.number("final_logit_softcapping"),
    }


def _query_scale(model: GGUFModel, deepest: int) -> float:
    """Returns the number that scores are divided by the root of: no entry has it, and the deepest Gemma has its own."""
    whole = model.required_number("block_count") == deepest
    return model.required_number("embedding_length") // model.heads if whole else model.head_dim


ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma": Architecture("gemma", ArchitectureNames(LLAMA, offset=1.0), _gemma, dtype="bfloat16"),
    "gemma2": Architecture("gemma2", GEMMA, _gemma2, dtype="bfloat16"),
    "gemma3": Architecture("gemma3_text", GEMMA, _gemma3, dtype="bfloat16"),
}
