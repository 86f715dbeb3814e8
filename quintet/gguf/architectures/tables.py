"""Names of tensors that several architectures share: name in the file -> module."""

from collections.abc import Mapping

from quintet.gguf.names import ArchitectureNames, Computed

LLAMA: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SHARED_EXPERTS: Mapping[str, str] = {
    f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")
}
SANDWICH: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# the second norm of a block is called by what is before it
LATER_NORM: Mapping[str, str] = {"post_attention_norm": "post_attention_layernorm"}

PLAIN = ArchitectureNames(LLAMA)
PERMUTED = ArchitectureNames({**LLAMA, **EXPERTS}, permutes_qk=True)
MIXTURE = ArchitectureNames({**LLAMA, **EXPERTS})
SANDWICHED = ArchitectureNames({**LLAMA, **SANDWICH})
GEMMA = ArchitectureNames({**LLAMA, **SANDWICH}, offset=1.0)


def bias_of_choice(name: str) -> Mapping[str, Computed]:
    """The bias of a router's choice, which the model's checkpoint calls `name` in a layer."""
    return {name: Computed("flat", ("exp_probs_b.bias",))}


def state_space(mixer: str, version: int = 2, convolution_bias: bool = True) -> Mapping[str, Computed]:
    """Tensors of Mamba that are no matrices; `mixer`: the module."""
    found = {
        "A_log": Computed("log_of_negative", ("ssm_a",)),
        "D": Computed("flat", ("ssm_d",)),
        "conv1d.weight": Computed("one_channel", ("ssm_conv1d.weight",)),
        "conv1d.bias": Computed("same", ("ssm_conv1d.bias",)),
    }
    if version == 2:
        found["dt_bias"] = Computed("same", ("ssm_dt.bias",))
        found["norm.weight"] = Computed("flat", ("ssm_norm.weight",))
    return {f"{mixer}.{name}": rule for name, rule in found.items() if convolution_bias or name != "conv1d.bias"}
