"""The Transformers backend: models that quintet has no file for, and some that it has, against transformers itself."""

import functools
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from quintet.api.explain import explain
from quintet.config import EngineConfig
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.interface.types import RankInfo
from quintet.layers.moe.moe import Experts
from quintet.model_loader.loader import declared_weights
from quintet.models import families
from quintet.models.transformers import TransformersForCausalLM
from quintet.models.transformers.trace import alike
from quintet.ops.norm import rms_norm
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.tiny import PLAIN, SERVED, VOCAB, WINDOW, Tiny, make, variant
from tests.helpers.platforms.engines import answers, continued, engine
from tests.helpers.platforms.loopback import LoopbackPlatform, each_rank
from tests.helpers.platforms.run_model import Runner
from tests.helpers.releases import need_model_type

BASE = {**PLAIN, "num_hidden_layers": 2}
EVEN = {
    "head_dim": 32,
    "rotary_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TIED = {"tie_word_embeddings": True}
MIXED = {"num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
# model types without a file here when this was written -> what is special about them
OTHERS: dict[str, dict[str, Any]] = {
    "afmoe": {"sliding_window": WINDOW},  # gated attention, windows in some layers, experts in some
    "bitnet": {},  # norms within branches
    "ctrl": {},  # learned nothing of positions but sines
    "cwm": {"head_dim": 8, "sliding_window": WINDOW},
    "diffllama": {"num_key_value_heads": 2},  # two calls of attention in each layer
    "gemma4_text": {**TIED, "sliding_window": WINDOW, "head_dim": 8},
    "granite_swa": {"sliding_window": WINDOW, "head_dim": 8},  # sinks
    "hyperclovax": {"head_dim": 8},
    "jetmoe": {"num_experts_per_tok": 2, "num_local_experts": 4, "kv_channels": 8},  # experts of its own make
    "minicpm3": {**LATENT, "v_head_dim": 8},  # K and V from a latent
    "nanochat": {},  # norms without weights
    "vaultgemma": {**TIED, "head_dim": 8, "sliding_window": WINDOW},
    "minimax_m2": {**MIXED, "head_dim": 8, "rotary_dim": 8},
    # some experts compute nothing
    "longcat_flash": {**LATENT, "num_layers": 1, "n_routed_experts": 4, "zero_expert_num": 3, "moe_topk": 3,
                      "expert_ffn_hidden_size": 40, "ffn_hidden_size": 60},
    "deepseek_v3": {**MIXED, **LATENT, "moe_intermediate_size": 40, "n_group": 1, "topk_group": 1,
                    "first_k_dense_replace": 1},
    "gpt_oss": {**MIXED, "head_dim": 8, "sliding_window": WINDOW},  # sinks, and experts that are not like ours
}  # fmt: skip
BACKEND = {"model_impl": "transformers"}
OURS = (("gemma2", "plain"), ("gpt2", "plain"), ("qwen3_moe", "plain"))


def other(family: str) -> Tiny:
    need_model_type(family)
    return make(family, {**BASE, **OTHERS[family]})


def assert_agrees(tiny: Tiny, **runner: Any) -> Runner:
    """Greedy tokens of a ragged batch over the paged cache are transformers', and its logits are near."""
    run = Runner(tiny, transformers_backend=True, **runner)
    assert isinstance(run.worker.model, TransformersForCausalLM)
    prompts = random_prompts(0, (23, 1, 40, 7), VOCAB)
    chosen = run.greedy(prompts, 6)
    references = [tiny.logits(prompt + more) for prompt, more in zip(prompts, chosen, strict=True)]
    for prompt, logits, reference in zip(prompts, run.prompts(prompts), references, strict=True):
        torch.testing.assert_close(logits, reference[: len(prompt)], rtol=0, atol=1e-4 * float(reference.std()))
    for prompt, more, reference in zip(prompts, chosen, references, strict=True):
        assert reference[len(prompt) - 1 : -1].argmax(-1).tolist() == more
    return run


@pytest.mark.parametrize("family", OTHERS)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    assert_agrees(other(family))


@pytest.mark.parametrize(("family", "name"), OURS)
def test_families_of_ours_run_by_the_code_of_transformers_too(family: str, name: str) -> None:
    assert_agrees(variant(family, name))


def test_products_norms_tables_and_experts_are_ours_where_they_are_plain() -> None:
    model = assert_agrees(variant("qwen3_moe", "plain")).worker.model
    left = [each.weight.name for each in declared_weights(model) if each.path == "beside"]
    assert left == [f"model.layers.{index}.mlp.gate.weight" for index in range(3)]  # its routers are no nn.Linear
    assert sum(isinstance(each, Experts) for each in model.modules()) == 3


def test_a_norm_is_ours_only_where_it_computes_the_same() -> None:
    class Odd(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = rms_norm(x, weight, 1e-6, 0.0)
        return normed

    assert alike(nn.RMSNorm(8, eps=1e-6), ours, 8)
    assert not alike(Odd(8, eps=1e-6), ours, 8)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["minimax_m2", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial_is_passed_at_the_sizes_of_published_models(family: str, dtype: torch.dtype) -> None:
    """Its numbers must not grow with the sizes until no token can be told from another."""
    wide = {"hidden_size": 3072, "intermediate_size": 1536, "head_dim": 64, "num_hidden_layers": 12}
    config = AutoConfig.for_model(family, **{**BASE, **OTHERS[family], **wide})
    worker = Worker(PLATFORM(), config, ModelSizes(dtype, 16, SERVED, transformers_backend=True))
    assert worker.kv_cache_layout.page_bytes == 12 * 2 * 3 * 64 * 16 * dtype.itemsize // len(
        worker.kv_cache_layout.groups
    )


def test_half_precision_is_near_transformers() -> None:
    tiny = other("gemma4_text")
    prompt = random_prompts(1, (30,), VOCAB)
    (logits,) = Runner(tiny, torch.bfloat16, transformers_backend=True).prompts(prompt)
    reference = tiny.logits(prompt[0])
    assert float((logits.float() - reference).abs().mean()) < 0.05 * float(reference.std())


# ---------------------------------------------------------------------------------------------------- through an engine


def test_a_model_without_a_file_here_is_run_by_transformers_and_said_so(tmp_path: Path) -> None:
    kind = next(each for each in reversed(OTHERS) if each not in families())
    tiny = other(kind)
    with engine(tiny) as llm:
        assert answers(llm) == continued(tiny)
    shown = str(explain(EngineConfig(model=str(tiny.folder), device="cpu", max_model_len=64)))
    assert f"model_impl transformers: quintet has no file for model type {kind!r}" in shown
    with pytest.raises(ValueError, match=f"{kind!r} is not supported"):
        engine(tiny, model_impl="quintet")


def test_asked_for_it_runs_a_family_that_has_a_file_here() -> None:
    tiny = variant("llama", "plain")
    with engine(tiny, model_impl="transformers") as llm, engine(tiny, model_impl="vllm") as own:
        assert answers(llm) == answers(own) == continued(tiny)
        assert isinstance(llm._client.engine_plan.ranks.workers[0].model, TransformersForCausalLM)  # type: ignore[attr-defined]


CUTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 7},
    "preempted": {"num_pages": 20, "page_size": 8, "enable_prefix_caching": False, "kv_cache_memory_bytes": None},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_seqs": 2},
}


@pytest.mark.parametrize("family", ["gemma4_text", "minimax_m2"])
def test_tokens_are_a_requests_own_however_it_runs(family: str) -> None:
    """With windows, and with experts; the second time from the prefix cache."""
    tiny, found = other(family), {}
    for name, settings in CUTS.items():
        with engine(tiny, **BACKEND, **settings) as llm:
            found[name] = answers(llm)
            found[f"{name}, again"] = answers(llm)
    assert all(each == continued(tiny) for each in found.values()), found


@pytest.mark.parametrize("family", ["cwm", "hyperclovax"])
def test_logits_are_the_same_to_the_bit_alone_and_in_a_batch(family: str) -> None:
    """What quintet promises on the CPU, where rows have multiples of 32 numbers: torch computes what is left over at a
    tensor's end by other code than the rest of it, such as the cosines of an odd number of tokens."""
    need_model_type(family)
    tiny = make(family, {**BASE, **OTHERS[family], **EVEN})
    prompts = random_prompts(2, (33, 5, 18), VOCAB)
    together = Runner(tiny, transformers_backend=True).prompts(prompts)
    alone = [Runner(tiny, transformers_backend=True).prompts([each])[0] for each in prompts]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_weights_may_be_quantized_while_they_are_loaded() -> None:
    """With int8 as our own family has it: the same products, the same tokens."""
    tiny = make("llama", {**BASE, "hidden_size": 96, "intermediate_size": 160, "head_dim": 16})
    with (
        engine(tiny, quantization="int8", model_impl="transformers") as llm,
        engine(tiny, quantization="int8") as own,
        engine(tiny) as plain,
    ):
        assert answers(llm) == answers(own)
        reasons = llm._client.engine_plan.reasons  # type: ignore[attr-defined]
        taken = [each._client.engine_plan.ranks.workers[0].weight_bytes for each in (llm, plain)]  # type: ignore[attr-defined]
    assert any(each.startswith("quantization int8: 15 products") for each in reasons), reasons
    assert taken[0] < 0.6 * taken[1]


def test_weights_are_replaced_in_a_running_engine(tmp_path: Path) -> None:
    first, second = (make("cwm", {**BASE, **OTHERS["cwm"]}, seed) for seed in (0, 1))
    with engine(first, **BACKEND) as llm:
        before = answers(llm)
        llm.reload_weights(str(second.folder))
        assert answers(llm) == continued(second) != before


# -------------------------------------------------------------------------------------------------- what is refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({}, "layers of linear_attention|layers keep a recurrent state"),
    "bloom": ({}, "BloomForCausalLM does not say that others may compute its attention"),
    "bart": ({}, "an encoder and a decoder"),
    "bert": ({}, "gives hidden states, no logits, and generates nothing"),
    "bert-generation": ({}, "its tokens see those that come after them"),
    "llama4_text": ({}, "layers of chunked_attention"),
    "doge": ({}, "masks of their own"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_it_cannot_compute_is_refused_with_the_reason(family: str) -> None:
    settings, why = REFUSED[family]
    config = AutoConfig.for_model(family, **{**BASE, **settings})
    with pytest.raises(ValueError, match=why):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, SERVED, transformers_backend=True))


def test_tensors_that_nothing_reads_are_refused_as_for_other_families(tmp_path: Path) -> None:
    tiny = other("cwm")
    tensors = load_file(tiny.folder / "model.safetensors")
    for changed, why in (
        ({**tensors, "model.layers.0.odd.weight": torch.ones(2)}, "model.layers.0.odd.weight, which this model has no"),
        ({name: each for name, each in tensors.items() if name != "model.norm.weight"}, "lacks model.norm.weight"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((tiny.folder / "config.json").read_bytes())
        with pytest.raises(ValueError, match=why):
            engine(Tiny(tmp_path, tiny.config, tiny.reference), **BACKEND)


# ---------------------------------------------------------------------------------------------------------- parallel


def test_ranks_share_out_what_the_plan_says() -> None:
    tiny = make("llama", {**BASE, "num_key_value_heads": 2})
    prompts = random_prompts(3, (19, 1, 33), VOCAB)
    whole = Runner(tiny, transformers_backend=True)
    platform = LoopbackPlatform()

    def work(rank: int, endpoint: str) -> tuple[list[torch.Tensor], int]:
        run = Runner(tiny, platform=platform, rank_info=RankInfo(rank, 2, endpoint), transformers_backend=True)
        return run.prompts(prompts), run.worker.kv_cache_layout.page_bytes

    expected = whole.prompts(prompts)
    for logits, page in each_rank(platform, 2, work):
        assert page == whole.worker.kv_cache_layout.page_bytes // 2
        for mine, theirs in zip(expected, logits, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-4 * float(mine.std()))


@pytest.mark.parametrize(
    ("family", "size", "why"),
    [
        ("olmo2", 2, r"its plan for tensor parallelism wants \w+"),  # its norms see all heads
        ("mixtral", 2, r"its plan for tensor parallelism wants \w+"),  # its experts
        ("llama", 4, "4 ranks cannot share its 2 KV heads evenly"),
        ("gpt2", 2, "no plan for tensor parallelism"),
    ],
)
def test_plans_that_are_not_carried_out_are_refused_by_name(family: str, size: int, why: str) -> None:
    config = AutoConfig.for_model(family, **{**BASE, "num_key_value_heads": 2})
    sizes = ModelSizes(torch.float32, 16, SERVED, transformers_backend=True)
    with pytest.raises(ValueError, match=why):
        Worker(LoopbackPlatform(), config, sizes, RankInfo(0, size, "here"))


# -------------------------------------------------------------------------------------- code that comes with the model

CONFIG = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
CODE = """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, input_ids=None, position_ids=None, **more):
        out = super().forward(input_ids=input_ids, position_ids=position_ids, **more)
        out.logits = CHANGED
        return out
"""


@functools.cache
def _modules() -> tempfile.TemporaryDirectory[str]:
    """Where transformers keeps such code; it looks for all of it in one folder as long as the process lives."""
    return tempfile.TemporaryDirectory(prefix="quintet-modules-")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """A folder with a modeling file: Llama, which chooses what Llama finds least likely."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", _modules().name)
    tiny, folder = variant("llama", "plain"), tmp_path / f"own_{tmp_path.name}"  # another module for each test
    folder.mkdir()
    (folder / "configuration_own.py").write_text(CONFIG)
    (folder / "modeling_own.py").write_text(CODE.replace("CHANGED", "-out.logits"))
    (folder / "model.safetensors").write_bytes((tiny.folder / "model.safetensors").read_bytes())
    named = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    said = json.loads((tiny.folder / "config.json").read_text())
    said |= {"model_type": "own_llama", "auto_map": named, "architectures": ["OwnForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(said))
    return Tiny(folder, tiny.config, tiny.reference)


def test_code_of_a_repository_is_not_run_unless_it_is_trusted(own: Tiny) -> None:
    (own.folder / "configuration_own.py").write_text("raise SystemExit('ran')")
    for settings in ({}, {"model_impl": "transformers"}):
        with pytest.raises(ValueError, match=r"comes with the model \(auto_map\), and none of it was run"):
            engine(own, **settings)


def test_a_config_that_calls_itself_trusted_runs_no_code(tmp_path: Path) -> None:
    tiny = variant("llama", "plain")
    said = json.loads((tiny.folder / "config.json").read_text())
    claims = {"runs_own_code": True, "name_or_path": str(tmp_path), "_name_or_path": str(tmp_path)}
    named = {"AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({**said, **claims, "auto_map": named}))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    (tmp_path / "model.safetensors").write_bytes((tiny.folder / "model.safetensors").read_bytes())
    with engine(Tiny(tmp_path, tiny.config, tiny.reference), **BACKEND) as llm:
        assert answers(llm, 4) == continued(tiny, 4)


def test_trusted_code_runs_with_a_warning(own: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), engine(own, trust_remote_code=True) as llm:
        found = answers(llm, 3)
    (said,) = {each.getMessage() for each in caplog.records if "trust_remote_code" in each.getMessage()}
    assert "it can do whatever you can" in said and "modeling_own.OwnForCausalLM" in said
    expected = []
    for ids in random_prompts(5, (17, 3, 30), VOCAB):
        for _ in range(3):
            ids = [*ids, int(own.logits(ids)[-1].argmin())]
        expected.append(ids[-3:])
    assert found == expected


def test_code_that_mixes_tokens_outside_of_attention_is_refused(own: Tiny) -> None:
    """Its attention alone has a cache here: what it adds of the token before would be another request's."""
    (own.folder / "modeling_own.py").write_text(CODE.replace("CHANGED", "out.logits + out.logits.roll(1, 1)"))
    with pytest.raises(ValueError, match="its layers mix tokens otherwise than by the attention"):
        engine(own, trust_remote_code=True)


def test_code_that_counts_tokens_by_their_place_in_a_step_is_refused(own: Tiny) -> None:
    """A step holds tokens of several requests, and later parts of prompts."""
    places = "out.logits * torch.arange(1, out.logits.shape[1] + 1)[None, :, None]"
    (own.folder / "modeling_own.py").write_text("import torch\n" + CODE.replace("CHANGED", places))
    with pytest.raises(ValueError, match="count tokens by themselves, whatever positions they are given"):
        engine(own, trust_remote_code=True)


def test_a_family_with_a_file_here_runs_no_code_even_if_it_is_trusted(tmp_path: Path) -> None:
    tiny = variant("llama", "plain")
    said = json.loads((tiny.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    (tmp_path / "model.safetensors").write_bytes((tiny.folder / "model.safetensors").read_bytes())
    with engine(Tiny(tmp_path, tiny.config, tiny.reference), trust_remote_code=True) as llm:
        assert answers(llm, 4) == continued(tiny, 4)
