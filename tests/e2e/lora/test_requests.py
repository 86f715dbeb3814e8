"""Requests with different adapters in one engine: no request gets another's, whatever else happens."""

from pathlib import Path

import pytest
import torch

from quintet import LLM, LoRARequest, SamplingParams
from quintet.lora.adapter import write_adapter
from quintet_tools.checkpoints.tiny import FAMILIES, Tiny, make
from tests.e2e.lora.adapters import PROMPTS, adapted, ask, products, request_of, served, tokens_of


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return make("llama", FAMILIES["llama"]["plain"])


@pytest.fixture(scope="module")
def three(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Adapters of all products, of ranks 2, 5 and 8."""
    folders = [tmp_path_factory.mktemp(f"adapter{rank}") for rank in (2, 5, 8)]
    for folder, rank in zip(folders, (2, 5, 8), strict=True):
        adapted(tiny.reference, products(tiny.reference), folder, seed=rank, r=rank)
    return [request_of(folder) for folder in folders]


def alone(llm: LLM, adapters: list[LoRARequest | None], prompt: list[int]) -> list[list[int]]:
    return [tokens_of(ask(llm, [prompt], each))[0] for each in adapters]


def test_a_batch_of_adapters_and_none_equals_each_alone(tiny: Tiny, three: list[LoRARequest]) -> None:
    mixed = [three[1], None, three[0], three[2], None, three[1]]
    with served(tiny, max_loras=3, enable_prefix_caching=False) as llm:
        want = alone(llm, mixed, PROMPTS[0])
        assert len({*map(tuple, want)}) == 4, "the adapters say the same"
        assert tokens_of(ask(llm, [PROMPTS[0]] * 6, mixed)) == want
    with served(tiny, max_loras=1, max_num_batched_tokens=4, max_num_seqs=4) as llm:  # chunks, and one slot in turn
        assert tokens_of(ask(llm, [PROMPTS[0]] * 6, mixed)) == want


def test_requests_without_an_adapter_have_the_bits_of_an_engine_without_adapters(
    tiny: Tiny, three: list[LoRARequest]
) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5, detokenize=False, ignore_eos=True)
    plain = LLM(
        str(tiny.folder), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=64, use_tqdm=False
    )
    want = ask(plain, [PROMPTS[0]], None, params)[0].outputs[0].logprobs
    plain.close()
    with served(tiny, max_loras=3) as llm:
        got = ask(llm, [PROMPTS[0]] * 3, [three[0], None, three[1]], params)[1].outputs[0].logprobs
    assert got == want


def test_preempted_requests_keep_their_adapters(tiny: Tiny, three: list[LoRARequest]) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, detokenize=False, ignore_eos=True)
    mixed = [three[0], three[1], None, three[2]]
    with served(tiny, max_loras=3) as llm:
        want = [tokens_of(ask(llm, [PROMPTS[0]], each, params))[0] for each in mixed]
    with served(tiny, max_loras=3, kv_cache_memory_bytes=None, num_pages=7, page_size=16) as llm:
        outputs = ask(llm, [PROMPTS[0]] * 4, mixed, params)
        assert tokens_of(outputs) == want
        assert llm.get_stats()["num_preemptions"] > 0


def test_other_files_under_the_same_name_never_meet_cached_pages(tiny: Tiny, tmp_path: Path) -> None:
    prompt = list(range(3, 40))  # two full pages
    with served(tiny, max_loras=1) as llm:
        found = []
        for seed in (1, 2):
            adapted(tiny.reference, {"q_proj", "v_proj", "down_proj"}, tmp_path / "adapter", seed=seed)
            request = request_of(tmp_path / "adapter")
            output = ask(llm, [prompt], request)
            assert output[0].num_cached_tokens == 0
            found.append(tokens_of(output))
            again = ask(llm, [prompt], request)
            assert again[0].num_cached_tokens == 32
            assert tokens_of(again) == found[-1]
        assert found[0] != found[1]
        assert ask(llm, [prompt], None)[0].num_cached_tokens == 0  # nor does the base


def test_an_adapter_from_tensors_is_that_of_the_same_files(tiny: Tiny, three: list[LoRARequest]) -> None:
    from safetensors.torch import load_file

    from quintet.common.json_files import read_object

    folder = Path(three[1].lora_path)
    tensors, config = load_file(folder / "adapter_model.safetensors"), read_object(folder / "adapter_config.json")
    given_tensors = LoRARequest("from tensors", 9, lora_tensors=tensors, peft_config=config)
    with served(tiny) as llm:
        assert tokens_of(ask(llm, PROMPTS, given_tensors)) == tokens_of(ask(llm, PROMPTS, three[1]))


def test_vllms_calls(tiny: Tiny, three: list[LoRARequest]) -> None:
    with served(tiny, max_loras=2, max_cpu_loras=4) as llm:
        assert llm.add_lora(three[0])
        assert llm.add_lora(LoRARequest("other", 7, three[1].lora_path))
        assert llm.list_loras() == {1, 7}
        assert llm.pin_lora(7)
        with pytest.raises(ValueError, match="one must stay free; raise max_loras"):
            llm.pin_lora(1)
        assert llm.remove_lora(1)
        assert not llm.remove_lora(1)
        assert llm.list_loras() == {7}
        with pytest.raises(ValueError, match="is not loaded"):
            llm.pin_lora("unknown")


def test_adapters_that_do_not_fit_are_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    def write(name: str, module: str, inputs: int, outputs: int, rank: int = 2) -> LoRARequest:
        prefix = f"base_model.model.{module}"
        tensors = {
            f"{prefix}.lora_A.weight": torch.ones(rank, inputs),
            f"{prefix}.lora_B.weight": torch.ones(outputs, rank),
        }
        write_adapter(tmp_path / name, {"peft_type": "LORA", "r": rank, "lora_alpha": 1}, tensors)
        return request_of(tmp_path / name)

    width = tiny.text.hidden_size
    wrong = {
        "model.layers.0.self_attn.wq, which this model has no product for": (
            "model.layers.0.self_attn.wq",
            width,
            width,
        ),
        "model.layers.99.mlp.up_proj": ("model.layers.99.mlp.up_proj", width, width),
        "mlp.experts.3.up_proj, which this model has no product for": (
            "model.layers.0.mlp.experts.3.up_proj",
            width,
            width,
        ),
        "layers.0.self_attn.o_proj: the adapter's A is": ("model.layers.0.self_attn.o_proj", width + 1, width),
        "raise max_lora_rank to 9": ("model.layers.0.self_attn.o_proj", width, width, 9),
    }
    with served(tiny) as llm:
        for at, (message, made) in enumerate(wrong.items()):
            with pytest.raises(ValueError, match=message.replace(".", r"\.")):
                ask(llm, PROMPTS, write(f"wrong{at}", *made))
        with pytest.raises(FileNotFoundError, match="check the adapter's path"):
            ask(llm, PROMPTS, LoRARequest("gone", 1, str(tmp_path / "gone")))
        assert tokens_of(ask(llm, PROMPTS, None))
    off = LLM(str(tiny.folder), device="cpu", skip_tokenizer_init=True, max_model_len=64, use_tqdm=False)
    with pytest.raises(ValueError, match="needs enable_lora=True"):
        ask(off, PROMPTS, LoRARequest("x", 1, str(tmp_path)))
    off.close()


def test_an_adapter_that_changes_while_it_is_read_fails_its_own_request(tiny: Tiny, tmp_path: Path) -> None:
    adapted(tiny.reference, {"q_proj"}, tmp_path / "adapter", seed=1)
    with served(tiny) as llm:
        manager = llm._client.engine.lora  # type: ignore[union-attr]
        assert manager is not None
        reference = llm._client.adapters.reference(request_of(tmp_path / "adapter"))
        manager.remove(reference.digest)
        adapted(tiny.reference, {"q_proj"}, tmp_path / "adapter", seed=2)
        assert "has changed since it was loaded" in manager.load(reference).wait()
