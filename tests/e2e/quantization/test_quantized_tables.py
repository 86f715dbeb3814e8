"""Tables of embeddings that stay quantized: a tied one is held once, and the model says what it said with floats."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quintet import LLM, SamplingParams
from quintet.hub.resolve import load_model_config
from quintet.interface.platform import Capabilities
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.quantization.checkpoint_config import read_quantization_config
from quintet.platforms.cpu import PLATFORM
from quintet.quantize.config import QuantizeConfig
from quintet.quantize.quantize import quantize
from quintet_tools.checkpoints.tiny import PLAIN, Tiny
from tests.helpers.platforms.run_model import Runner
from tests.quantize.test_gguf_writer import original

FOLDER = Path(__file__).parents[2] / "data" / "quantized" / "gguf"
TIED, UNTIED = ("gemma2", "gemma3", "gpt2", "qwen3"), ("llama", "qwen2moe")
IDS = [3, 17, 60, 5, 5, 41, 0, 63, 22]
FACTS = PLATFORM.probe()
assert isinstance(FACTS, Capabilities)
if "embedding" not in FACTS.weight_formats:
    pytest.skip("tables are floats without the compiled extension", allow_module_level=True)


def runner(path: Path, activations: int | None, dtype: torch.dtype, rows: bool = True) -> Runner:
    assert isinstance(FACTS, Capabilities)
    config = load_model_config(path)
    checkpoint, kept = (
        read_quantization_config(config.quantization_config),
        FACTS.weight_formats - ({"embedding"} if not rows else set()),
    )
    forms = QuantizationPlan(checkpoint=checkpoint, supported_kinds=kept, activations=activations)
    return Runner(Tiny(path, config, None), dtype=dtype, quantization=forms, max_model_len=64)


def table_of(run: Runner) -> torch.Tensor:
    model = run.worker.model
    (name,) = [n for n, _ in model.named_parameters() if n.endswith(("embed_tokens.weight", "wte.weight"))]
    found: torch.Tensor = model.get_parameter(name)
    return found


def held(run: Runner) -> int:
    """Bytes of the parameters that files hold, each once."""
    named = run.worker.model.named_parameters(remove_duplicate=False)
    each = {p.data_ptr(): p.nbytes for name, p in named if not name.endswith((".table", ".counted", ".unbiased"))}
    return sum(each.values())


@pytest.mark.parametrize("name", [*TIED, *UNTIED])
@pytest.mark.parametrize("activations", [8, 16])
def test_logits_are_to_the_bit_those_of_a_table_in_floats(name: str, activations: int) -> None:
    """float16 is what GGUF's scales are in: tiles hold them exactly."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours, floats = (runner(FOLDER / f"{name}.gguf", activations, dtype, rows) for rows in (True, False))
        assert torch.equal(ours.prompts([IDS])[0], floats.prompts([IDS])[0])
        table, head = table_of(ours), ours.worker.model.lm_head.linear.weight
        assert table.dtype == torch.uint8 and table_of(floats).dtype == dtype
        assert (table.data_ptr() == head.data_ptr()) == (name in TIED)
        assert held(ours) == ours.worker.weight_bytes < floats.worker.weight_bytes == held(floats)


SIZES: dict[str, Any] = {
    **PLAIN, "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 1, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["Q8_0", "Q4_0", "Q5_1", "Q6_K", "Q4_K_S"])
def test_a_tied_model_of_any_type_takes_its_table_once(scheme: str, tmp_path: Path) -> None:
    """K-quants' scales of two levels are exact, too."""
    folder = original("llama", tmp_path / "model", **SIZES)
    made = quantize(str(folder), QuantizeConfig(output=str(tmp_path / "made.gguf"), scheme=scheme), progress=False)
    ours, floats = (runner(made.folder, 8, torch.bfloat16, rows) for rows in (True, False))
    (got,), (want,) = ours.prompts([IDS]), floats.prompts([IDS])
    assert torch.equal(got, want)
    assert held(ours) == ours.worker.weight_bytes == held(floats) - 2048 * 256 * 2
    assert table_of(ours).data_ptr() == ours.worker.model.lm_head.linear.weight.data_ptr()


def answer(llm: LLM) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0.0, detokenize=False, ignore_eos=True)
    return list(llm.generate({"prompt_token_ids": IDS}, params, use_tqdm=False)[0].outputs[0].token_ids)


def test_a_tied_table_is_reloaded_and_kept_for_the_next_start(tmp_path: Path) -> None:
    path = FOLDER / "qwen3.gguf"
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_pages": 32, "weights_cache": tmp_path / "kept"}
    llm, again = LLM(path, **settings), LLM(path, **settings)
    models = [each._client.engine_plan.ranks.workers[0].model for each in (llm, again)]
    for model in models:
        table, head = model.model.embed_tokens, model.lm_head.linear
        places = [table.weight.data_ptr(), table.scales.data_ptr()]
        assert places == [head.weight.data_ptr(), head.scales.data_ptr()]
    want = answer(llm)
    assert answer(again) == want
    table = models[0].model.embed_tokens.weight
    before, place = table.clone(), table.data_ptr()
    table.data.zero_()
    assert answer(llm) != want
    llm.reload_weights()
    assert answer(llm) == want and torch.equal(table, before) and table.data_ptr() == place


def test_what_a_start_says_of_tables() -> None:
    from quintet.config import EngineConfig
    from quintet.engine.startup import prepare

    prepared = prepare(EngineConfig(FOLDER / "qwen3.gguf", device="cpu"))
    prepared.ranks.close()
    said = "\n".join(prepared.reasons)
    assert "1 table of embeddings as w8a8" in said and "dequantized" not in said
