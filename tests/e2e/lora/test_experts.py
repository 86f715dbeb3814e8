"""Adapters of experts, in the two forms that PEFT writes, against transformers and PEFT in float32."""

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quintet import LLM, LoRARequest, SamplingParams
from quintet.common.json_files import read_object
from quintet.lora.adapter import write_adapter
from quintet.lora.peft_config import CONFIG, WEIGHTS
from quintet.quantize.lora.merge import merge_lora
from quintet_tools.checkpoints.tiny import FAMILIES, Tiny, make
from tests.e2e.lora.adapters import PROMPTS, adapted, ask, assert_equal_to, logits_of, request_of, served, tokens_of

STACKS = ("experts.gate_up_proj", "experts.down_proj")
MODULES = ("q_proj", "o_proj")
NAMES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
ROOM = {"lora_target_modules": "all", "enable_prefix_caching": False}


def tiny_of(family: str) -> Tiny:
    return make(family, next(iter(FAMILIES[family].values())))


def stacks_of(tiny: Tiny, folder: Path, seed: int = 0, **settings: Any) -> Any:
    """Adapts both stacks of experts, and some of the attention."""
    found = {name.rpartition(".")[2] for name, _ in tiny.reference.named_modules()}
    targets = [each for each in MODULES if each in found]
    return adapted(tiny.reference, targets, folder, seed, target_parameters=list(STACKS), **settings)


def matrices_of(tiny: Tiny, family: str, folder: Path, seed: int, rank: int = 3) -> Any:
    """Writes an adapter with A and B of each expert, as models of transformers 4 have them -> PEFT's model with it."""
    (parent, last), config, random = NAMES[family], tiny.text, torch.Generator().manual_seed(seed)
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for expert in range(experts):
            for name in last:
                inputs, outputs = (config.hidden_size, width) if name != last[2] else (width, config.hidden_size)
                prefix = f"base_model.model.model.layers.{layer}.{parent}.experts.{expert}.{name}"
                tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * 0.15
                tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * 0.15
    entries = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 7, "target_modules": list(last)}
    write_adapter(folder, entries, tensors)
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(copy.deepcopy(tiny.reference), folder).eval()


def assert_served(tiny: Tiny, theirs: Any, folder: Path, **settings: Any) -> None:
    """Tokens are PEFT's, and those of the base without the adapter."""
    ids = [*PROMPTS[0], 4]
    assert (logits_of(theirs, ids) - tiny.logits(ids)).abs().max() > 0.1, "this adapter changes nothing that is seen"
    with served(tiny, **ROOM, **settings) as llm:
        assert_equal_to(theirs, ask(llm, PROMPTS, request_of(folder)))
        assert_equal_to(tiny.reference, ask(llm, PROMPTS, None))


QUICK = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
OTHERS = ("qwen2_moe", "llama4_text", "olmoe", "phimoe", "deepseek_v2", "granitemoehybrid")


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_stacks_of_experts_give_the_tokens_of_peft(family: str, tmp_path: Path) -> None:
    tiny = tiny_of(family)
    assert_served(tiny, stacks_of(tiny, tmp_path / "adapter"), tmp_path / "adapter")


@pytest.mark.parametrize("family", NAMES)
def test_matrices_of_each_expert_give_the_tokens_of_peft(family: str, tmp_path: Path) -> None:
    tiny = tiny_of(family)
    assert_served(tiny, matrices_of(tiny, family, tmp_path / "adapter", 1), tmp_path / "adapter")


@pytest.mark.parametrize(("family", "form"), [("qwen3_moe", "matrices"), ("mixtral", "stacks"), ("gpt_oss", "stacks")])
def test_merged_experts_give_the_tokens_of_peft(family: str, form: str, tmp_path: Path) -> None:
    """Into files with matrices of each expert, and of gpt-oss with stacks."""
    tiny, folder, merged = tiny_of(family), tmp_path / "adapter", tmp_path / "merged"
    theirs = stacks_of(tiny, folder) if form == "stacks" else matrices_of(tiny, family, folder, 1)
    merge_lora(str(tiny.folder), folder, merged, progress=False)
    with served(replace(tiny, folder=merged), enable_lora=False) as llm:
        assert_equal_to(theirs, ask(llm, PROMPTS, None))


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return tiny_of("qwen3_moe")


@pytest.fixture(scope="module")
def mixed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """Adapters of stacks, of none, of matrices, and of the attention alone."""
    folders = [tmp_path_factory.mktemp(name) for name in ("stacks", "matrices", "attention")]
    stacks_of(tiny, folders[0], seed=1, r=5)
    matrices_of(tiny, "qwen3_moe", folders[1], seed=2)
    adapted(tiny.reference, MODULES, folders[2], seed=3)
    stacks, matrices, attention = map(request_of, folders)
    return [stacks, None, matrices, attention, stacks]


PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5, detokenize=False, ignore_eos=True)


def answers(llm: LLM, adapters: list[LoRARequest | None]) -> list[Any]:
    """Tokens and log-probabilities of one prompt with each adapter, in one batch."""
    outputs = ask(llm, [PROMPTS[0]] * len(adapters), adapters, PARAMS)
    return [(tokens, each.outputs[0].logprobs) for tokens, each in zip(tokens_of(outputs), outputs, strict=True)]


def alone(llm: LLM, adapters: list[LoRARequest | None]) -> list[Any]:
    return [answers(llm, [each])[0] for each in adapters]


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_a_batch_of_adapters_and_none_has_the_bits_of_each_alone(
    settings: dict[str, Any], tiny: Tiny, mixed: list[LoRARequest | None]
) -> None:
    with served(tiny, max_loras=3, **ROOM, **settings) as llm:
        want = alone(llm, mixed)
        assert len({tuple(tokens) for tokens, _ in want}) > 2, "the adapters say the same"
        for _ in range(3):  # steps that are recorded, proven and replayed
            assert answers(llm, mixed) == want
    with served(tiny, max_loras=1, max_num_batched_tokens=4, max_num_seqs=4, **ROOM, **settings) as llm:  # chunks
        assert answers(llm, mixed) == want
    with served(tiny, enable_prefix_caching=False, enable_lora=False, **settings) as llm:
        assert answers(llm, [None]) == [want[1]]


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"pipeline_parallel_size": 2},
        {"model_impl": "transformers"},
        {"enforce_eager": True},
    ],
    ids=lambda each: [*each][-1],
)
def test_the_tokens_are_those_of_one_rank(
    settings: dict[str, Any], tiny: Tiny, mixed: list[LoRARequest | None]
) -> None:
    with served(tiny, max_loras=3, **ROOM) as llm:
        want = [tokens for tokens, _ in answers(llm, mixed)]
    with served(tiny, max_loras=2, **ROOM, **settings) as llm:
        assert [tokens for tokens, _ in answers(llm, mixed)] == want


def test_experts_have_room_where_it_is_asked_for(tiny: Tiny, mixed: list[LoRARequest | None], tmp_path: Path) -> None:
    stacks, _, _, attention, _ = mixed
    with served(tiny) as llm:
        assert tokens_of(ask(llm, PROMPTS, attention))
        with pytest.raises(ValueError, match=r"experts\.0\.\w+, .*set lora_target_modules to all, or .* with experts"):
            ask(llm, PROMPTS, stacks)
    with served(tiny, lora_target_modules=["experts", "q_proj"]) as llm:
        with pytest.raises(ValueError, match=r"o_proj, .*have no room: .* with o_proj"):
            ask(llm, PROMPTS, stacks)
        adapted(tiny.reference, ["q_proj"], tmp_path / "adapter", target_parameters=list(STACKS))
        assert tokens_of(ask(llm, PROMPTS, request_of(tmp_path / "adapter")))


def test_inputs_and_outputs_that_are_exchanged_are_known_by_their_shapes(tiny: Tiny, tmp_path: Path) -> None:
    """As PEFT saved stacks [E, out, in] when it took all for [E, in, out]."""
    theirs = adapted(tiny.reference, [], tmp_path / "new", target_parameters=list(STACKS))
    tensors, config = load_file(tmp_path / "new" / WEIGHTS), read_object(tmp_path / "new" / CONFIG)
    for name in [each for each in tensors if ".lora_A." in each]:
        a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        count = len(a) // config["r"]
        rows, columns = a.view(count, config["r"], -1), b.view(len(b), config["r"], count)
        tensors[name] = columns.permute(2, 1, 0).reshape(-1, len(b))
        tensors[name.replace("lora_A", "lora_B")] = rows.permute(2, 1, 0).reshape(-1, len(a))
    write_adapter(tmp_path / "old", config, tensors)
    with served(tiny, **ROOM) as llm:
        assert_equal_to(theirs, ask(llm, PROMPTS, request_of(tmp_path / "old")))
    merge_lora(str(tiny.folder), tmp_path / "old", tmp_path / "merged", progress=False)
    with served(replace(tiny, folder=tmp_path / "merged"), enable_lora=False) as llm:
        assert_equal_to(theirs, ask(llm, PROMPTS, None))


def test_experts_that_move_have_no_adapters(tiny: Tiny) -> None:
    settings = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}
    with pytest.raises(ValueError, match="enable_eplb"), served(tiny, **ROOM, **settings):
        pass


def test_an_adapter_of_other_experts_is_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_parameters": list(STACKS)}
    prefix, (hidden, experts) = "base_model.model.model.layers.0.mlp.experts", (tiny.text.hidden_size, 3)
    tensors = {
        f"{prefix}.base_layer.lora_A.weight": torch.ones(2 * experts, hidden),
        f"{prefix}.base_layer.lora_B.weight": torch.ones(6, 2 * experts),
        f"{prefix}.lora_A.weight": torch.ones(2 * experts, 3),
        f"{prefix}.lora_B.weight": torch.ones(hidden, 2 * experts),
    }
    write_adapter(tmp_path / "other", config, tensors)
    with served(tiny, **ROOM) as llm, pytest.raises(ValueError, match=r"experts\.\d\.\w+: .* it was made for another"):
        ask(llm, PROMPTS, request_of(tmp_path / "other"))
