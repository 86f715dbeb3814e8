"""Ranks as processes: they say what one process says, fail as one, and leave nothing behind."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel

from quintet import LLM, SamplingParams
from quintet.api.explain import explain
from quintet.config import EngineConfig
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.quantize.config import QuantizeConfig
from quintet.quantize.quantize import quantize
from quintet.sampling_params import StructuredOutputsParams
from quintet.structured_output.grammar_source import grammar_text
from quintet_tools.checkpoints.tiny import EVERY, PLAIN, VOCAB, Tiny, make, variant
from tests.helpers.checkpoints.packed import gptq
from tests.helpers.platforms.engines import answers, engine, told
from tests.helpers.processes import gone, interrupted, killed_while_it_starts
from tests.helpers.servers.serving import LONG, Server, until, words_of

pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
WIDE = {
    **PLAIN, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "num_hidden_layers": 2,
}  # fmt: skip
ODD = {**PLAIN, "num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 8}


def ranked(tiny: Tiny, ranks: int, **settings: Any) -> LLM:
    return engine(tiny, tensor_parallel_size=ranks, **settings)


def pids(llm: LLM) -> list[int]:
    others = llm._client.engine_plan.ranks.remote_ranks
    assert others is not None
    return others.pids


# what, how it is made, its settings, ranks
MATRIX: dict[str, tuple[Callable[[], Tiny], dict[str, Any], int]] = {
    "llama over four": (lambda: make("llama", WIDE), {}, 4),
    "qwen3, odd heads, its KV head on every rank": (lambda: make("qwen3", ODD), {}, 2),
    "gemma3, windows": (lambda: variant("gemma3_text", "plain"), {}, 2),
    "qwen3_moe over four": (lambda: variant("qwen3_moe", "plain"), {}, 4),
    "deepseek_v2": (lambda: variant("deepseek_v2", "plain"), {}, 2),
    "granitemoehybrid, guessed tokens": (
        lambda: variant("granitemoehybrid", "plain"),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        2,
    ),
    "int4": (lambda: make("llama", WIDE), {"quantization": "int4", "activation_bits": 16}, 2),
    "w4a8": (lambda: make("llama", WIDE), {"quantization": "int4"}, 2),
    "a cache in fp8 whose scales are computed": (
        lambda: make("llama", WIDE),
        {"kv_cache_dtype": "fp8", "calculate_kv_scales": True},
        2,
    ),
    "guessed tokens": (
        lambda: make("llama", WIDE),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        2,
    ),
    "gptq": (lambda: gptq(make("llama", WIDE), 4, 64), {}, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_ranks_say_what_one_process_says(name: str) -> None:
    made, settings, ranks = MATRIX[name]
    tiny = made()
    with engine(tiny, **settings) as alone, ranked(tiny, ranks, **settings) as several:
        want = [answers(alone) for _ in range(2)]
        assert [answers(several) for _ in range(2)] == want  # the second time from recorded steps, and cached pages


def scores(llm: LLM) -> list[float]:
    """Log-probabilities of the prompts' own tokens."""
    prompts: Any = [{"prompt_token_ids": ids} for ids in random_prompts(5, (17, 3, 30), VOCAB)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert output.prompt_token_ids and output.prompt_logprobs
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found += [each[token].logprob for token, each in pairs if each]
    return found


@pytest.mark.slow
def test_int8_of_ranks_is_as_near_as_the_groups_of_their_shares_allow() -> None:
    """Groups end with a rank's share, so that their tokens need not be those of one process."""
    tiny = make("llama", WIDE)
    with engine(tiny) as exact, engine(tiny, quantization="int8") as alone:
        plain, want = np.array(scores(exact)), np.array(scores(alone))
    with ranked(tiny, 2, quantization="int8") as several:
        got = np.array(scores(several))
    assert abs(got - plain).max() < 1.5 * abs(want - plain).max() < 0.5


# where a row has one scale, and each token: how it is made, its settings, ranks
ROWS: dict[str, tuple[Callable[[], Tiny], dict[str, Any], int]] = {
    "w8a8": (lambda: make("llama", WIDE), {"quantization": "w8a8", "dtype": "bfloat16"}, 4),
    "w8a8, biases": (lambda: variant("opt", next(iter(EVERY["opt"]))), {"quantization": "w8a8"}, 2),
    "w8a8, odd heads": (lambda: make("qwen3", ODD), {"quantization": "w8a8"}, 2),
    "w8a8, a state": (lambda: variant("mamba2", "plain"), {"quantization": "w8a8"}, 2),
    "fp8": (lambda: make("llama", WIDE), {"quantization": "fp8"}, 2),
    "fp8a8": (lambda: make("llama", WIDE), {"quantization": "fp8a8"}, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if "biases" in each else pytest.mark.sweep) for each in ROWS]
)
def test_what_has_one_scale_for_a_row_says_what_one_process_says_to_the_bit(name: str) -> None:
    made, settings, ranks = ROWS[name]
    tiny = made()
    with engine(tiny, **settings) as alone, ranked(tiny, ranks, **settings) as several:
        assert [scored(several) for _ in range(2)] == [scored(alone) for _ in range(2)]


@pytest.mark.slow
def test_a_checkpoint_whose_activations_are_rounded_says_what_one_process_says_to_the_bit(tmp_path: Path) -> None:
    tiny = make("llama", WIDE)
    asked = QuantizeConfig(output=str(tmp_path / "w8a8"), scheme="W8A8", report=False)
    quantize(str(tiny.folder), asked, progress=False)
    tiny = Tiny(tmp_path / "w8a8", tiny.config, tiny.reference)
    with engine(tiny) as alone, ranked(tiny, 2) as several:
        assert scored(several) == scored(alone)


def scored(llm: LLM) -> list[Any]:
    prompts: Any = [{"prompt_token_ids": ids} for ids in random_prompts(5, (17, 3, 30), VOCAB)]
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=2, prompt_logprobs=1
    )
    return told(llm, prompts, params)


@pytest.mark.slow
def test_vectors_of_ranks_are_those_of_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 72, "max_position_embeddings": 64, "initializer_range": 0.2}  # fmt: skip
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path)
    texts: Any = [[5, 6, 7], [1] * 40, [9]]
    found = []
    for ranks in (1, 2):
        settings: Any = {"device": "cpu", "skip_tokenizer_init": True, "use_tqdm": False, "tensor_parallel_size": ranks}
        with LLM(str(tmp_path), **settings) as llm:
            found.append([each.outputs.data for _ in range(4) for each in llm.embed(texts, use_tqdm=False)])
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, atol=2e-6)


def lacking(tiny: Tiny, folder: Path) -> Path:
    """The same checkpoint without one of its weights."""
    folder = folder / "lacking"
    folder.mkdir()
    for file in tiny.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_two_ranks_live_as_one(tmp_path: Path) -> None:
    """One start for all of it: starting is what takes time."""
    tiny = variant("llama", "plain")
    traces: Any = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces")}
    with engine(tiny) as alone, ranked(tiny, 2, profiler_config=traces) as llm:
        assert "2 ranks: a process each" in " ".join(llm._client.engine_plan.reasons)
        want = answers(alone)
        assert [answers(llm) for _ in range(3)] == [want] * 3
        # drawn tokens, penalties, and log-probabilities
        drawn = SamplingParams(
            temperature=1.0, seed=3, max_tokens=9, detokenize=False, presence_penalty=0.5, logprobs=2
        )
        prompts: Any = [{"prompt_token_ids": ids} for ids in random_prompts(5, (17, 3, 30), VOCAB)]
        for one, two in zip(alone.generate(prompts, drawn), llm.generate(prompts, drawn), strict=True):
            assert one.outputs[0].token_ids == two.outputs[0].token_ids
        # a stream that is left, so that a request is aborted
        for _ in llm.stream(prompts, SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)):
            break
        assert answers(llm) == want
        llm.reset_prefix_cache()
        llm.sleep(2)
        with pytest.raises(ValueError, match="is asleep"):
            llm.generate(prompts, GREEDY)
        with pytest.raises(ValueError, match="wake it up"):
            llm.sleep(1)
        llm.wake_up()
        assert answers(llm) == want
        llm.reload_weights()
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):  # on both ranks, which go on as they were
            llm.reload_weights(str(lacking(tiny, tmp_path)))
        assert answers(llm) == want
        _failures(llm, want)
        llm.start_profile()
        assert answers(llm) == want
        assert Path(llm.stop_profile()).is_file()
        assert answers(llm) == want
        llm.save_sharded_state(str(tmp_path / "sharded"))
        assert len(list((tmp_path / "sharded").glob("*.safetensors"))) == 2
        processes = pids(llm)
        assert not gone(*processes)
    assert until(lambda: gone(*processes), 10)


def _failures(llm: LLM, want: list[list[int]]) -> None:
    """A step that fails on one rank, here rank 0, ends the requests in it, and nothing else."""
    worker = llm._client.engine_plan.ranks.workers[0]
    run = worker.run

    def broken(*arguments: Any) -> Any:
        worker.run = run  # type: ignore[method-assign]
        raise MemoryError("no room for activations")

    worker.run = broken  # type: ignore[method-assign,assignment]
    prompts: Any = [{"prompt_token_ids": [5, 6, 7]}]
    [output] = llm.generate(prompts, GREEDY)
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].error == "RankFailed: rank 0 of 2: MemoryError: no room for activations"
    assert answers(llm) == want


@pytest.mark.slow
def test_a_grammar_holds_on_every_rank() -> None:
    pytest.importorskip("llguidance")
    with LLM("bundled", device="cpu", tensor_parallel_size=2, use_tqdm=False, kv_cache_memory_bytes="16M") as llm:
        params = SamplingParams(
            temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="(yes|no) [0-9]{3}")
        )
        [output] = llm.generate("Well?", params, use_tqdm=False)
        said = output.outputs[0].text
        assert said[:3] in ("yes", "no ") and said[-3:].isdigit()
        assert "shared memory" in llm._client.engine_plan.reasons[1] + llm._client.engine_plan.reasons[2]


@pytest.mark.slow
def test_a_grammar_that_takes_long_to_compile_keeps_nobody_waiting() -> None:
    pytest.importorskip("llguidance")
    with LLM("bundled", device="cpu", tensor_parallel_size=2, use_tqdm=False, kv_cache_memory_bytes="16M") as llm:
        client, gate = llm._client, threading.Event()
        make = client.grammars._compiled._make
        client.grammars._compiled._make = lambda text: gate.wait(60) and make(text)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        shape = grammar_text(StructuredOutputsParams(regex="[0-9]{4}"), client.config.structured_outputs_config)
        (prompt,) = client.parse("Well?")
        for name, text in (("shaped", shape), ("left", shape), ("plain", "")):
            [[asked]] = client.input_processor.admit_all([(name, prompt)], params, grammar=text)
            client.engine.add(asked)
        with pytest.raises(ValueError, match="is in use"):
            client.engine.add(replace(asked, request_id="left", grammar=shape))
        assert (client.engine.stats().num_deferred, len(client.engine)) == (2, 3)
        with pytest.raises(ValueError, match="has 3 requests"):
            client.engine.sleep()
        said: dict[str, list[int]] = {"shaped": [], "plain": []}
        ended = list[str]()
        while client.engine.busy:
            for delta in client.engine.step():
                said[delta.request_id] += delta.token_ids
                ended += [delta.request_id] if delta.finish_reason else []
            if "plain" in ended and not gate.is_set():
                client.engine.abort(["left"])
                gate.set()
        assert ended == ["plain", "shaped"] and len(said["plain"]) == 8
        assert client.tokenizer is not None
        assert client.tokenizer.hf.decode(said["shaped"], skip_special_tokens=True).strip().isdigit()


@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_all_end() -> None:
    tiny = variant("llama", "plain")
    llm = ranked(tiny, 3)
    processes = pids(llm)
    assert answers(llm)
    os.kill(processes[1], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 2 of 3 has ended: it was killed by SIGKILL"):
        for _ in range(100):
            answers(llm)
    with pytest.raises(RuntimeError, match="rank 2 of 3 has ended"):
        answers(llm)
    llm.close()
    assert until(lambda: gone(*processes), 10)


@pytest.mark.slow
def test_one_that_stands_still_is_named_after_the_time_limit() -> None:
    tiny = variant("llama", "plain")
    llm = ranked(tiny, 2, distributed_timeout_seconds=1)
    (other,) = pids(llm)
    answers(llm)
    os.kill(other, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 of 2 did not come within 1 s"):
        answers(llm)
    assert time.monotonic() - began < 60
    llm.close()
    assert until(lambda: gone(other), 10)


def test_explain_says_how_ranks_run_and_starts_none() -> None:
    before = len(psutil.Process().children())
    page = str(explain(EngineConfig(model="bundled", device="cpu", tensor_parallel_size=2)))
    assert "2 ranks: a process each" in page and "communicator: shared memory, sums in rank order" in page
    assert len(psutil.Process().children()) == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tensor_parallel_size": 17}, "at most 16 ranks"),
        ({"tensor_parallel_size": 2, "max_model_len": 10**7}, "max_model_len"),
        ({"tensor_parallel_size": 2, "logits_processors": (Unsendable := type("Unsendable", (), {}),)}, "by name"),
    ],
)
def test_what_cannot_start_says_why_and_leaves_no_process(settings: Any, says: str) -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    with pytest.raises(ValueError, match=says):
        LLM("bundled", device="cpu", use_tqdm=False, **settings)
    assert until(lambda: {each.pid for each in psutil.Process().children(recursive=True)} <= before, 10)


@pytest.mark.slow
def test_weights_that_no_rank_can_read_are_said_as_by_one(tmp_path: Path) -> None:
    tiny = variant("llama", "plain")
    folder = lacking(tiny, tmp_path)
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        ranked(Tiny(folder, tiny.config, tiny.reference), 2)


OFFLINE = """
import sys, threading
from quintet import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, tensor_parallel_size=int(sys.argv[2]), use_tqdm=False,
          kv_cache_memory_bytes="16M", max_model_len=64)
print("ready", *llm._client.engine_plan.ranks.remote_ranks.pids, flush=True)
greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
while True:
    try:
        llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 3, greedy, use_tqdm=False)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except RuntimeError as error:
        print(error, flush=True)
        sys.exit(9)
"""


def offline(tiny: Tiny, ranks: int) -> tuple["subprocess.Popen[str]", list[int]]:
    words = [sys.executable, "-c", OFFLINE, str(tiny.folder), str(ranks)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    ready, *others = process.stdout.readline().split()
    assert ready == "ready"
    return process, [process.pid, *map(int, others)]


def test_ctrl_c_interrupts_a_call_and_the_engine_goes_on() -> None:
    process, processes = offline(variant("llama", "plain"), 2)
    assert interrupted(process) == ["interrupted\n"] * 3
    assert until(lambda: gone(*processes), 10)


@pytest.mark.slow
def test_whichever_rank_is_killed_whenever_nothing_hangs_and_nothing_is_left() -> None:
    tiny, draw = variant("llama", "plain"), random.Random(0)
    for victim in range(3):
        process, processes = offline(tiny, 3)
        assert process.stdout is not None
        time.sleep(draw.random() * 0.3)
        os.kill(processes[victim], signal.SIGKILL)
        if victim:
            assert f"rank {victim} of 3 has ended: it was killed by SIGKILL" in process.stdout.readline()
            assert process.wait(30) == 9
        else:
            process.wait(30)
        assert until(lambda left=processes: gone(*left), 10), f"rank {victim}: {processes}"  # type: ignore[misc]


def test_a_rank_that_is_killed_while_it_starts_ends_the_start() -> None:
    tiny = variant("llama", "plain")
    error = killed_while_it_starts(lambda: ranked(tiny, 2).close())
    assert isinstance(error, ValueError) and "rank 1 of 2 has ended: it was killed by SIGKILL" in str(error)


@pytest.mark.slow
def test_a_server_of_two_ranks_answers_and_ends_with_a_rank() -> None:
    flags = ("--model", "bundled", "--device", "cpu", "--tensor-parallel-size", "2", "--kv-cache-memory-bytes", "16M")
    with Server(*flags) as server:
        asked = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        assert httpx.post(server.url + "/v1/completions", json=asked, timeout=60).json()["choices"][0]["text"]
        followers = [each for each in server.children() if "quintet.engine.parallel.follower" in words_of(each)]
        assert len(followers) == 1
        with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "max_tokens": 400}, timeout=60) as more:
            lines = more.iter_lines()
            assert next(lines)
            followers[0].kill()
            assert any("rank 1 of 2 has ended: it was killed by SIGKILL" in line for line in lines), (
                "its caller hears it"
            )
        assert until(lambda: server.process.poll() is not None, 60)
        assert server.process.returncode == 1
        assert "rank 1 of 2 has ended: it was killed by SIGKILL" in server.output
        assert until(lambda: not any(each.is_running() for each in followers), 10)
