"""lora_target_modules: a name that no module has is refused with what to write instead."""

import pytest

from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet_tools.checkpoints.tiny import FAMILIES, make

DENSE = "names .*: down_proj, embed_tokens, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj, or all$"


@pytest.mark.parametrize(
    ("family", "targets", "refusal"),
    [
        ("llama", ["q_porj"], rf"has the name 'q_porj' \(did you mean 'q_proj'\?\); {DENSE}"),
        ("llama", ["q_proj", "v_porj"], rf"has the name 'v_porj' \(did you mean 'v_proj'\?\); {DENSE}"),
        ("llama", ["all", "mlp.q_proj"], rf"has the name 'mlp.q_proj' \(write q_proj\); {DENSE}"),
        ("llama", ["experts"], rf"has the name 'experts'; {DENSE}"),
        (
            "llama",
            ["qkv_proj", "o_proj", "gate_up_proj"],
            r"'qkv_proj' \(write q_proj, k_proj, v_proj\), 'gate_up_proj' \(write gate_proj, up_proj\)",
        ),
        ("phi3", ["q_proj"], r"'q_proj' \(write qkv_proj\)"),
        (
            "qwen3_moe",
            ["gate_up_proj", "down_proj"],
            r"'gate_up_proj' \(write experts\), 'down_proj' \(write experts\)",
        ),
    ],
)
def test_a_name_of_no_module_is_refused(family: str, targets: list[str], refusal: str) -> None:
    tiny = make(family, next(iter(FAMILIES[family].values())))
    config = EngineConfig(
        str(tiny.folder), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=64,
        enable_lora=True, lora_target_modules=targets, weights_cache="none", kv_cache_memory_bytes=1 << 24,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"^lora_target_modules: .*{refusal}"):
        EngineClient(config)
