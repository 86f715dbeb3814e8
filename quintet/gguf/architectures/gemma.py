"""Gemma's families: norms multiply by 1 + w, which the files hold."""

import math
from collections.abc import Mapping

from quintet.gguf.architectures.architecture import Architecture, Entries, windows
from quintet.gguf.architectures.rope import rope
from quintet.gguf.architectures.tables import GEMMA, LLAMA, SANDWICH
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ENDS, ArchitectureNames, Computed


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


def _gemma3n(model: GGUFModel) -> Entries:
    """The file has what activations are cut at, in deviations from their mean; the config the share that is cut."""
    cuts = model.per_layer("activation_sparsity_scale", -math.inf)
    streams = model.required_number("altup.num_inputs")
    if streams != STREAMS:
        raise ValueError(f"{model.path}: altup.num_inputs is {streams}, and files of {STREAMS} are read")
    return {
        **windows(model, every=5),
        "rope_parameters": {
            "full_attention": rope(model, base=1e6),
            "sliding_attention": {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", 1e4)},
        },
        "activation_sparsity_pattern": [round(0.5 * (1 + math.erf(each / math.sqrt(2))), 6) for each in cuts],
        "num_kv_shared_layers": model.count("attention.shared_kv_layers"),
        "vocab_size_per_layer_input": model.shape("per_layer_token_embd.weight")[0],
        "hidden_size_per_layer_input": model.required_number("embedding_length_per_layer_input"),
        "altup_active_idx": model.count("altup.active_idx"),
        "altup_num_inputs": streams,
        "laurel_rank": model.shape("blk.0.laurel_l.weight")[0],
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
    }


def _query_scale(model: GGUFModel, deepest: int) -> float:
    """Returns the number that scores are divided by the root of: no entry has it, and the deepest Gemma has its own."""
    whole = model.required_number("block_count") == deepest
    return model.required_number("embedding_length") // model.heads if whole else model.head_dim


STREAMS = 4  # of AltUp, which the converter's files have
_STREAMS = {
    **LLAMA, **SANDWICH, "altup_correct_coef": "altup.correction_coefs", "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm",
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
    "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right", "laurel_post_norm": "laurel.post_laurel_norm",
}  # fmt: skip
_GEMMA3N = ArchitectureNames(
    _STREAMS,
    {
        **ENDS,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    computed={
        "altup.correct_output_scale": Computed("same", ("altup_correct_scale.weight",)),
        **{
            f"/model.altup_{name}.{index}.weight": Computed(f"part {index}", (f"{source}.weight",))
            for name, source in (("projections", "altup_proj"), ("unembed_projections", "altup_unembd_proj"))
            for index in range(STREAMS - 1)
        },
    },
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma": Architecture("gemma", ArchitectureNames(LLAMA, offset=1.0), _gemma, dtype="bfloat16"),
    "gemma2": Architecture("gemma2", GEMMA, _gemma2, dtype="bfloat16"),
    "gemma3n": Architecture("gemma3n_text", _GEMMA3N, _gemma3n, dtype="bfloat16"),
    "gemma3": Architecture("gemma3_text", GEMMA, _gemma3, dtype="bfloat16"),
}
