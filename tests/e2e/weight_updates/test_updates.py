"""Weights that a trainer sends to a running engine: tokens are those of an engine that was started on these weights."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quintet import LLM, AsyncLLM, SamplingParams
from quintet_tools.checkpoints.tiny import PLAIN, Tiny, make
from tests.helpers.checkpoints.quantized import awq, fp8
from tests.helpers.platforms.engines import answers, engine

SIZES = {
    **PLAIN, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "num_hidden_layers": 2,
}  # fmt: skip
NORM = "model.layers.0.input_layernorm.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)


def tensors_of(tiny: Tiny) -> dict[str, Tensor]:
    return load_file(tiny.folder / "model.safetensors")


def shuffled(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    listed = list(tensors.items())
    random.Random(0).shuffle(listed)
    return listed


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"quantization": "int8"}),
        ("llama", {"quantization": "int4"}),
        ("llama", {"quantization": "fp8"}),
        ("qwen3_moe", {}),
        pytest.param("qwen3_moe", {"quantization": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_an_update_gives_what_a_fresh_engine_gives(family: str, settings: dict[str, Any]) -> None:
    """All tensors, in any order, twice: at the same addresses."""
    tied = {"tie_word_embeddings": True} if family == "llama" else {}
    old, new = make(family, {**SIZES, **tied}), make(family, {**SIZES, **tied}, 1)
    with engine(old, **settings) as llm, engine(new, **settings) as fresh:
        worker = llm._client.engine_plan.ranks.workers[0]
        held = {name: each.data_ptr() for name, each in worker.model.named_parameters()}
        before, want = answers(llm), answers(fresh)
        assert before != want
        for tensors, expected in ((new, want), (old, before), (new, want)):
            llm.update_weights(shuffled(tensors_of(tensors)))
            assert answers(llm) == expected
        assert llm.collective_rpc("weight_checksums") == fresh.collective_rpc("weight_checksums")
        assert {name: each.data_ptr() for name, each in worker.model.named_parameters()} == held
        assert llm.get_weight_version() == "3" and llm.get_stats()["weight_updates"] == 3


@pytest.mark.parametrize("name", ["awq", "fp8"])
def test_engines_on_quantized_checkpoints_take_tensors_of_that_format(name: str) -> None:
    write = {
        "awq": lambda seed: awq(make("llama", SIZES, seed), 128),
        "fp8": lambda seed: fp8(make("qwen3", SIZES, seed)),
    }
    old, new = write[name](0), write[name](1)
    with engine(old) as llm, engine(new) as fresh:
        llm.update_weights(shuffled(tensors_of(new)))
        assert answers(llm) == answers(fresh)


def test_floats_for_an_fp8_checkpoint_are_quantized_and_for_awq_are_refused_by_name() -> None:
    one_group = {**SIZES, "intermediate_size": 128}  # of inputs: then each output has one scale, as where fp8 is made
    plain = make("qwen3", one_group, 1)
    with engine(fp8(make("qwen3", one_group))) as llm, engine(plain, quantization="fp8") as fresh:
        llm.update_weights(tensors_of(plain))
        assert answers(llm) == answers(fresh)
    with engine(awq(make("llama", SIZES), 128)) as llm:
        before = answers(llm)
        with pytest.raises(
            ValueError, match=r"q_proj\.weight came in floats, .* cannot be made of floats .*q_proj\.qweight"
        ):
            llm.update_weights([(Q, tensors_of(make("llama", SIZES, 1))[Q])], partial=True)
        assert answers(llm) == before, "nothing was written"


def test_one_tensor_alone_with_partial(tmp_path: Path) -> None:
    tiny, other = make("llama", SIZES), tensors_of(make("llama", SIZES, 1))
    mixed = {**tensors_of(tiny), DOWN: other[DOWN]}
    (folder := tmp_path / "mixed").mkdir()
    (folder / "config.json").write_text((tiny.folder / "config.json").read_text())
    save_file(mixed, folder / "model.safetensors")
    with engine(tiny) as llm, engine(Tiny(folder, tiny.config, None)) as fresh:
        before = answers(llm)
        llm.update_weights({DOWN: other[DOWN]}, partial=True, weight_version="mixed")
        assert answers(llm) == answers(fresh) != before
        assert llm.get_weight_version() == "mixed"


def test_a_tensor_that_the_trainer_changes_while_it_waits_is_taken_as_it_came() -> None:
    old, new = make("llama", SIZES), make("llama", SIZES, 1)

    def one_buffer() -> Any:
        for name, tensor in tensors_of(new).items():
            sent = tensor.clone()
            yield name, sent
            sent.zero_()

    with engine(old) as llm, engine(new) as fresh:
        llm.update_weights(one_buffer())
        assert answers(llm) == answers(fresh)


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing() -> None:
    tiny = make("llama", SIZES)
    tensors = tensors_of(tiny)
    with engine(tiny) as llm:
        before = answers(llm)
        for name, tensor, match in (
            ("model.layers.9.mlp.down_proj.weight", tensors[DOWN], r"no place for model\.layers\.9"),
            (DOWN, tensors[DOWN].t().contiguous(), r"down_proj\.weight is \[256, 128\], not \[128, 256\]"),
            (DOWN, tensors[DOWN].int(), r"down_proj\.weight is of torch\.int32, not of floats"),
            ("model.layers.0.mlp.dwn_proj.weight", tensors[DOWN], r"did you mean 'model\.layers\.0\.mlp\.down_proj"),
        ):
            with pytest.raises(ValueError, match=match):
                llm.update_weights([(name, tensor)], partial=True)
            assert answers(llm) == before and llm.get_weight_version() == "default"


def test_missing_tensors_are_named_and_the_update_stays_open() -> None:
    old, new = make("llama", SIZES), make("llama", SIZES, 1)
    tensors = tensors_of(new)
    last = {DOWN: tensors.pop(DOWN)}
    with engine(old) as llm, engine(new) as fresh:
        llm.start_weight_update()
        llm.update_weights(tensors)
        with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.down_proj\.weight never came"):
            llm.finish_weight_update()
        with pytest.raises(ValueError, match=r"a weight update is open.*call finish_weight_update\(\)"):
            answers(llm)
        assert llm.is_paused()
        llm.update_weights(last)
        llm.finish_weight_update("2024-step-7")
        assert answers(llm) == answers(fresh) and llm.get_weight_version() == "2024-step-7"
        with pytest.raises(ValueError, match=r"q_proj\.weight never came, and others that they make one weight"):
            llm.update_weights({name: each for name, each in tensors.items() if name != Q}, partial=True)


@pytest.mark.parametrize("way", ["update", "reload"])
def test_a_torn_update_serves_nothing_until_the_weights_are_whole(way: str) -> None:
    old, new = make("llama", SIZES), make("llama", SIZES, 1)

    def dies() -> Any:
        yield from list(tensors_of(new).items())[:8]
        raise ConnectionError("the trainer is gone")

    with engine(old) as llm, engine(new) as fresh:
        before = answers(llm)
        with pytest.raises(ConnectionError, match="the trainer is gone"):
            llm.update_weights(dies())
        torn = (
            r"replaced in part, and that failed \(the trainer is gone\); send a full update, or call reload_weights\(\)"
        )
        with pytest.raises(ValueError, match=torn):
            answers(llm)
        assert llm.get_stats()["torn"] == 1
        with pytest.raises(ValueError, match="earlier update had failed"):
            llm.update_weights({NORM: tensors_of(new)[NORM]}, partial=True)
        with pytest.raises(ValueError, match="open|replaced in part"):
            answers(llm)
        if way == "update":
            llm.update_weights(tensors_of(new))
            assert answers(llm) == answers(fresh)
        else:
            llm.reload_weights()
            assert answers(llm) == before
        assert llm.get_stats()["torn"] == 0 == llm.get_stats()["paused"]


def test_a_head_that_differs_is_refused_where_the_model_shares_one_weight() -> None:
    tiny = make("llama", {**SIZES, "tie_word_embeddings": True})
    tensors = tensors_of(tiny)
    table = tensors["model.embed_tokens.weight"]
    with engine(tiny) as llm:
        llm.update_weights({**tensors, "lm_head.weight": table.clone()})
        with pytest.raises(ValueError, match=r"lm_head\.weight differs from the token embedding"):
            llm.update_weights({**tensors, "lm_head.weight": table + 1})


@pytest.mark.parametrize("keep_kv", [False, True])
def test_running_requests_go_on_with_the_tokens_that_they_have(keep_kv: bool) -> None:
    """With new weights; keep_kv leaves what the old ones computed, and no other request finds it."""
    long = {**SIZES, "max_position_embeddings": 512}
    old, new = make("llama", long), make("llama", long, 1)
    prompt: Any = {"prompt_token_ids": list(range(5, 45))}
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)

    async def served() -> tuple[list[int], list[int], int]:
        small: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "16M", "max_model_len": 512}
        llm = AsyncLLM(str(old.folder), device="cpu", skip_tokenizer_init=True, **small)
        said: list[int] = []
        computed = 0
        try:
            async for output in llm.generate(prompt, params):
                if len(said) < 5 <= len(output.outputs[0].token_ids):
                    computed = llm._client.engine.stats().steps.num_prompt_tokens
                    await llm.update_weights(tensors_of(new), keep_kv=keep_kv)
                said = list(output.outputs[0].token_ids)
            again = [each async for each in llm.generate(prompt, params)]
            done = llm._client.engine.stats().steps.num_prompt_tokens
        finally:
            llm.shutdown()
        return said, list(again[-1].outputs[0].token_ids), done - computed

    said, again, computed = asyncio.run(served())
    with engine(new, max_model_len=512) as fresh:
        (whole,) = fresh.generate([prompt], params, use_tqdm=False)
    assert again == list(whole.outputs[0].token_ids), "the prompt was computed anew"
    assert len(said) == 200 and said != again
    # without keep_kv the request that ran computes its prompt anew, and two pages of it are found by the other
    assert computed == (40 if keep_kv else 40 + 8)


def grown(llm: LLM, tensors: list[dict[str, Tensor]], count: int) -> int:
    """Bytes by which resident memory grows in so many updates, after some first ones."""
    import psutil

    process = psutil.Process()
    for index in range(20):
        llm.update_weights(tensors[index % 2])
    before = process.memory_info().rss
    for index in range(count):
        llm.update_weights(tensors[index % 2])
    return int(process.memory_info().rss - before)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_does_not_grow(count: int) -> None:
    old, new = make("llama", SIZES), make("llama", SIZES, 1)
    with engine(old, quantization="int8") as llm, engine(old, quantization="int8") as fresh:
        tensors = [tensors_of(new), tensors_of(old)]
        size = sum(each.numel() * each.element_size() for each in tensors[0].values())
        # an update that kept a tenth of what it brought would show; what allocators keep for reuse does not
        assert grown(llm, tensors, count) < count * size / 10
        assert answers(llm) == answers(fresh)


def test_the_path_that_trl_writes_by_takes_one_tensor_at_a_time() -> None:
    old, new = make("llama", SIZES), make("llama", SIZES, 1)
    with engine(old) as llm, engine(new) as fresh:
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        tensors = tensors_of(new)
        q = tensors.pop(Q)
        for name, tensor in tensors.items():
            assert model.load_weights([(name, tensor)]) == {name}
        with pytest.raises(
            ValueError, match=r"replaced in part: model\.layers\.0\.self_attn\.q_proj\.weight never came"
        ):
            answers(llm)
        model.load_weights([(Q, q)])
        llm.reset_prefix_cache()
        assert answers(llm) == answers(fresh)


def test_sleep_with_tags_lets_weights_be_written_before_the_cache_is_there() -> None:
    old, new = make("llama", SIZES), make("llama", SIZES, 1)
    with engine(old) as llm, engine(new) as fresh:
        before = answers(llm)
        llm.sleep(2)
        with pytest.raises(ValueError, match=r"weights are asleep .*wake_up\(tags=\['weights'\]\)"):
            llm.update_weights(tensors_of(new))
        with pytest.raises(ValueError, match="wake them before the cache"):
            llm.wake_up(tags=["kv_cache"])
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.update_weights(tensors_of(new))
        with pytest.raises(ValueError, match="asleep"):
            answers(llm)
        llm.wake_up(tags=["kv_cache"])
        assert answers(llm) == answers(fresh)
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm) == before and llm.get_weight_version() == "default", (
            "what was dropped is the folder's again"
        )


@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=["-tp 2", "-dp 2"])
def test_ranks_and_engines_that_are_processes_take_all_or_none(settings: dict[str, Any]) -> None:
    old, new = make("llama", SIZES), make("llama", SIZES, 1)
    tensors = tensors_of(new)
    with engine(new) as fresh:
        want = answers(fresh)
    with engine(old, **settings) as llm:
        before = answers(llm)
        with pytest.raises(ValueError, match=r"down_proj\.weight is \[256, 128\]"):
            llm.update_weights({DOWN: tensors[DOWN].t().contiguous()}, partial=True)
        assert answers(llm) == before
        llm.update_weights(shuffled(tensors), weight_version="new")
        assert answers(llm) == want and llm.get_weight_version() == "new"
        checksums = llm.collective_rpc("weight_checksums")
        assert len(checksums) == 2 and (checksums[0] == checksums[1]) == ("data_parallel_size" in settings)
        with pytest.raises(ValueError, match="nothing that arrives is unpickled; put it into a class"):
            llm.apply_model(lambda model: 1)

        def dies() -> Any:
            yield from list(tensors_of(old).items())[:8]
            yield "nonsense", torch.zeros(3)

        with pytest.raises(ValueError, match="no place for nonsense"):
            llm.update_weights(dies())
        assert answers(llm) == want, "the segment was refused whole"
        llm.reload_weights()
        assert answers(llm) == before and llm.get_weight_version() == "default"
