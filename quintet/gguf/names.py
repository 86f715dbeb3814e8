"""Maps GGUF's tensor names to our modules' names, by architecture, and describes how the tensors were changed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

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
SANDWICH: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ENDS: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Of rotary positions, which the configuration is made of.
ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class ArchitectureNames:
    """An architecture's."""

    blocks: Mapping[str, str]
    ends: Mapping[str, str] = field(default_factory=lambda: ENDS)
    layers: str = "model.layers"
    permutes_qk: bool = False  # rows of q and k stand for rotations of neighbours: see unturned()
    offset: float = 0.0  # what was added to the weights of norms
    transposed: tuple[str, ...] = ()  # of the modules: [out, in] in GGUF, [in, out] in the model's own checkpoints

    def module(self, name: str) -> str | None:
        """Returns the module of a tensor's name without its last part; None: the model has no such module."""
        if name in self.ends:
            return self.ends[name]
        if expert := ALONE.fullmatch(name):
            return f"{self.layers}.{int(expert[1])}.mlp.experts.{int(expert[3])}.{expert[2]}_proj"
        block = BLOCK.fullmatch(name)
        if block is None or block[2] not in self.blocks:
            return None
        return f"{self.layers}.{int(block[1])}.{self.blocks[block[2]]}"

    def modules(self, name: str) -> tuple[str, ...]:
        """Returns a tensor's modules, in the order of its rows: several if the file joins what the model has apart."""
        block = BLOCK.fullmatch(name)
        apart = FUSED.get(block[2], ()) if block is not None and block[2] not in self.blocks else ()
        found = [self.module(f"blk.{block[1]}.{each}") for each in apart] if block is not None else []
        known = found or [self.module(name)]
        return tuple(each for each in known if each is not None)


# What llama.cpp's converter joins if asked (--fuse-qkv, --fuse-gate-up-exps): rows over one another.
FUSED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}
BLOCK = re.compile(r"blk\.(\d{1,5})\.(\w+)")
ALONE = re.compile(r"blk\.(\d{1,5})\.ffn_(gate|up|down)\.(\d{1,5})")  # an expert of the first files of Mixtral

GPT2 = ArchitectureNames(
    {
        "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
    },
    {
        "token_embd": "transformer.wte", "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f", "output": "lm_head",
    },
    "transformer.h",
    transposed=("c_attn", "c_proj", "c_fc"),
)  # fmt: skip
PHI3 = ArchitectureNames({**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
GEMMA = ArchitectureNames({**LLAMA, **SANDWICH}, offset=1.0)
OLMO2 = ArchitectureNames({**LLAMA, **SANDWICH})
MIXTURE = ArchitectureNames({**LLAMA, **EXPERTS})
PERMUTED = ArchitectureNames({**LLAMA, **EXPERTS}, permutes_qk=True)


def without_expert_number(module: str) -> str:
    """A module's name without the number of its expert."""
    return EXPERT.sub(".experts.", module)


EXPERT = re.compile(r"\.experts\.\d+\.")


def unpermuted_rows(rows: int, head_dim: int) -> list[int]:
    """Returns, for each row of q or k as the model has them, the row of the file.

    Rotations are of the features i and i + head_dim / 2 in the model, and of neighbours in the file. ValueError where
    the rows are no heads.
    """
    check_head_rows(rows, head_dim)
    half = head_dim // 2

    def place(feature: int) -> int:
        return feature % half * 2 + feature // half

    return [row - row % head_dim + place(row % head_dim) for row in range(rows)]


def check_head_rows(rows: int, head_dim: int) -> None:
    """ValueError where rows of q or k are no heads."""
    if head_dim < 2 or head_dim % 2 or rows % head_dim:
        raise ValueError(
            f"{rows} rows of queries or keys are no heads of {head_dim} features, in pairs; fetch it again"
        )
