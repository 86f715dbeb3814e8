"""EXAONE 3 and 3.5 (LG AI Research 2024): Llama by other names."""

from quintet.models.llama import LlamaForCausalLM

RENAMED = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.h.": "model.layers.",
    "transformer.ln_f.": "model.norm.",
    ".attn.attention.out_proj.": ".self_attn.o_proj.",
    ".attn.attention.": ".self_attn.",
    ".mlp.c_fc_0.": ".mlp.gate_proj.",
    ".mlp.c_fc_1.": ".mlp.up_proj.",
    ".mlp.c_proj.": ".mlp.down_proj.",
    ".ln_1.": ".input_layernorm.",
    ".ln_2.": ".post_attention_layernorm.",
}


class ExaoneForCausalLM(LlamaForCausalLM):
    """The same blocks."""

    renamed_tensors = RENAMED
    ignored_tensors = (*LlamaForCausalLM.ignored_tensors, r"transformer\.h\.\d+\.attn\.attention\.rotary\.inv_freq")
