"""Several engines of one model on the CPU: the tokens of one, whoever is asked, and nothing left when one dies."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from transformers import BertConfig, BertModel

from quintet import LLM, AsyncLLM, EngineConfig, SamplingParams
from quintet.api.explain import explain
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.data_parallel import local_engine_configs
from quintet.engine.data_parallel.engines import DataParallelEngines
from quintet.sampling_params import StructuredOutputsParams
from quintet_tools.checkpoints.tiny import VOCAB, Tiny, variant
from tests.helpers.platforms.engines import answers, engine
from tests.helpers.processes import gone, interrupted
from tests.helpers.servers.serving import Server, until, words_of

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPTS: Any = [{"prompt_token_ids": ids} for ids in random_prompts(3, (17, 3, 30, 1, 22, 9, 40, 2), VOCAB)]


def several(tiny: Tiny, count: int = 2, **settings: Any) -> LLM:
    return engine(tiny, data_parallel_size=count, **settings)


def engines_of(llm: LLM) -> DataParallelEngines:
    engines = llm._client.engine
    assert isinstance(engines, DataParallelEngines)
    return engines


def family(pids: list[int]) -> list[int]:
    """These processes and those that they started."""
    return [each.pid for pid in pids for each in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]


def said(llm: LLM, params: SamplingParams) -> list[list[list[int]]]:
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    return [[list(each.token_ids) for each in output.outputs] for output in found]


def test_two_engines_live_as_one() -> None:
    """One start for all of it: starting is what takes time."""
    tiny = variant("llama", "plain")
    with engine(tiny) as alone, several(tiny) as llm:
        assert "2 engines: a process each" in " ".join(llm._client.engine_plan.reasons)
        assert [said(llm, GREEDY) for _ in range(2)] == [said(alone, GREEDY) for _ in range(2)]
        each = engines_of(llm).clients.each()
        assert len(each) == 2 and all(stats.steps.num_generation_tokens > 0 for _, stats in each), "both have worked"
        # drawn tokens are those of one engine too: a draw depends on the request's number, not on who draws
        drawn = SamplingParams(temperature=1.0, max_tokens=6, n=2, detokenize=False, presence_penalty=0.5, logprobs=2)
        assert said(llm, drawn) == said(alone, drawn)
        for _ in llm.stream(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False)):
            break  # so that requests are aborted
        assert llm.get_stats()["num_running"] == 0
        want = answers(alone)
        assert answers(llm) == want
        llm.reset_prefix_cache()
        llm.sleep(1)
        assert llm.is_sleeping()
        with pytest.raises(ValueError, match="is asleep"):
            llm.generate(PROMPTS, GREEDY)
        with pytest.raises(ValueError, match="wake it up"):
            llm.sleep(2)
        llm.wake_up()
        llm.reload_weights()
        assert answers(llm) == want
        with pytest.raises(ValueError, match="several engines hold the same weights"):
            llm.save_sharded_state("nowhere")
        with pytest.raises(ValueError, match="traces are off"):
            llm.start_profile()
        processes = family([each.pid for each in engines_of(llm).children])
        assert len(processes) == 2 and not gone(*processes)
    assert until(lambda: gone(*processes), 10)


@pytest.mark.slow
def test_each_of_two_engines_may_have_two_ranks() -> None:
    tiny = variant("qwen3_moe", "plain")
    pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")
    with engine(tiny) as alone, several(tiny, tensor_parallel_size=2) as llm:
        assert said(llm, GREEDY) == said(alone, GREEDY)
        processes = family([each.pid for each in engines_of(llm).children])
        assert len(processes) == 4
        os.kill(processes[1], signal.SIGKILL)  # a rank of engine 0, which ends with it
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        errors = [each.outputs[0].error for each in outputs if each.outputs[0].error]
        assert errors and all("engine 0 of 2 has ended: it exited with code 1 (" in str(each) for each in errors)
        assert all("rank 1 of 2" in str(each) for each in errors)
    assert until(lambda: gone(*processes), 10)


@pytest.mark.slow
def test_a_beginning_is_computed_once_where_its_engine_has_room() -> None:
    tiny = variant("llama", "plain")
    with several(tiny, page_size=16) as llm:
        beginning = random_prompts(9, (32,), VOCAB)[0]
        for end in range(6):
            llm.generate([{"prompt_token_ids": [*beginning, end]}], GREEDY, use_tqdm=False)
        stats = llm.get_stats()
        assert stats["prefix_hits"] == 5 * 32
        llm.reset_prefix_cache()
        llm.generate([{"prompt_token_ids": [*beginning, 7]}], GREEDY, use_tqdm=False)
        assert llm.get_stats()["prefix_hits"] == 5 * 32


@pytest.mark.slow
def test_vectors_of_engines_are_those_of_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 72, "max_position_embeddings": 64, "initializer_range": 0.2}  # fmt: skip
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path)
    texts: Any = [[5, 6, 7], [1] * 40, [9], [8, 7]]
    settings: Any = {"device": "cpu", "skip_tokenizer_init": True, "use_tqdm": False}
    with LLM(str(tmp_path), **settings) as alone, LLM(str(tmp_path), data_parallel_size=2, **settings) as llm:
        for one, two in zip(alone.embed(texts, use_tqdm=False), llm.embed(texts, use_tqdm=False), strict=True):
            np.testing.assert_array_equal(one.outputs.data, two.outputs.data)


@pytest.mark.slow
def test_grammars_and_text_on_every_engine() -> None:
    pytest.importorskip("llguidance")
    with LLM("bundled", device="cpu", data_parallel_size=2, use_tqdm=False, kv_cache_memory_bytes="16M") as llm:
        params = SamplingParams(
            temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}")
        )
        outputs = llm.generate(["Well?", "And then?", "Once"], params, use_tqdm=False)
        assert all(len(each.outputs[0].text) == 3 and each.outputs[0].text.isdigit() for each in outputs)


async def _asked(llm: AsyncLLM, ids: list[int]) -> list[int]:
    async for output in llm.generate({"prompt_token_ids": ids}, GREEDY):
        last = output
    return list(last.outputs[0].token_ids)


@pytest.mark.slow
async def test_async_callers_share_the_engines() -> None:
    import asyncio

    tiny = variant("llama", "plain")
    prompts = random_prompts(4, (5, 9, 13, 2), VOCAB)
    settings: Any = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64,
                     "kv_cache_memory_bytes": "16M"}  # fmt: skip
    with engine(tiny) as alone:
        asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
        want = [list(each.outputs[0].token_ids) for each in alone.generate(asked, GREEDY, use_tqdm=False)]
    llm = AsyncLLM(str(tiny.folder), data_parallel_size=2, **settings)
    try:
        assert await asyncio.gather(*[_asked(llm, ids) for ids in prompts]) == want
    finally:
        llm.shutdown()


@pytest.mark.slow
def test_an_engine_that_dies_ends_what_it_had_and_no_more_is_taken() -> None:
    tiny = variant("llama", "plain")
    llm = several(tiny)
    engines = engines_of(llm)
    processes = family([each.pid for each in engines.children])
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    os.kill(processes[1], signal.SIGSTOP)  # so that it has some when it dies
    threading.Timer(0.5, os.kill, (processes[1], signal.SIGKILL)).start()
    outputs = llm.generate(PROMPTS, long, use_tqdm=False)
    ends = Counter(each.outputs[0].error for each in outputs)
    why = "engine 1 of 2 has ended: it was killed by SIGKILL; the system may have run out of memory"
    assert ends == {None: 4, why: 4}
    assert [each.outputs[0].finish_reason for each in outputs if each.outputs[0].error] == ["error"] * 4
    for call in (lambda: llm.generate(PROMPTS, GREEDY), lambda: llm.sleep(1), llm.reset_prefix_cache):
        with pytest.raises(RuntimeError, match="engine 1 of 2 has ended"):
            call()
    llm.close()
    assert until(lambda: gone(*processes), 10)


@pytest.mark.slow
def test_one_that_stands_still_is_named_after_the_time_limit() -> None:
    tiny = variant("llama", "plain")
    llm = several(tiny, distributed_timeout_seconds=2)
    processes = [each.pid for each in engines_of(llm).children]
    answers(llm)
    os.kill(processes[0], signal.SIGSTOP)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    errors = {each.outputs[0].error for each in outputs}
    assert errors == {None, "engine 0 of 2 has given no sign of life for 2 s and was ended"}
    llm.close()
    assert until(lambda: gone(*processes), 10)


def test_one_that_is_killed_while_it_starts_ends_the_start() -> None:
    tiny, found = variant("llama", "plain"), list[BaseException]()
    before = {each.pid for each in psutil.Process().children()}

    def start() -> None:
        try:
            several(tiny).close()
        except BaseException as error:
            found.append(error)

    def children() -> list[psutil.Process]:
        return [each for each in psutil.Process().children() if each.pid not in before]

    thread = threading.Thread(target=start)
    thread.start()
    assert until(lambda: len(children()) == 2, 60)
    processes = [each.pid for each in children()]
    os.kill(processes[1], signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()
    [error] = found
    assert isinstance(error, ValueError)
    assert "the engines did not start: engine 1 of 2 has ended: it was killed by SIGKILL" in str(error)
    assert until(lambda: gone(*processes), 10)


def test_explain_says_how_engines_share_the_machine_and_starts_none() -> None:
    before = len(psutil.Process().children())
    page = str(explain(EngineConfig(model="bundled", device="cpu", data_parallel_size=2)))
    assert "2 engines: a process each, with" in page and "that share the requests" in page
    assert len(psutil.Process().children()) == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"data_parallel_size": 2, "max_model_len": 10**7}, "max_model_len"),
        ({"data_parallel_size": 2, "device": "null"}, "data_parallel_size must be 1 on this platform"),
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, "is none of 2 engines"),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, "data_parallel_hybrid_lb=True .*`quintet router`"),
        ({"data_parallel_size": 2, "data_parallel_hybrid_lb": True}, "say how many .*data_parallel_size_local"),
        ({"data_parallel_size": 2, "data_parallel_external_lb": True}, "say which .*data_parallel_rank"),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_size_local": 2,
                "data_parallel_start_rank": 3,
                "data_parallel_hybrid_lb": True,
            },
            "this machine's 2 engines .* not among 4",
        ),
        (
            {
                "data_parallel_size": 4,
                "data_parallel_size_local": 2,
                "data_parallel_rank": 1,
                "data_parallel_hybrid_lb": True,
            },
            "data_parallel_rank is for servers of one engine each",
        ),
        ({"data_parallel_size": 2, "logits_processors": (type("Unsendable", (), {}),)}, "by name"),
        (
            {"data_parallel_size": 2, "profiler_config": {"profiler": "torch", "torch_profiler_dir": "traces"}},
            "a trace is of one engine",
        ),
    ],
)
def test_what_cannot_start_says_why_and_leaves_no_process(settings: Any, says: str) -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    with pytest.raises(ValueError, match=says):
        LLM("bundled", **{"device": "cpu", "use_tqdm": False, **settings})
    assert until(lambda: {each.pid for each in psutil.Process().children(recursive=True)} <= before, 10)


def test_one_of_two_may_be_started_alone() -> None:
    tiny = variant("llama", "plain")
    with engine(tiny) as alone, engine(tiny, data_parallel_size=2, data_parallel_rank=1) as second:
        assert not isinstance(second._client.engine, DataParallelEngines)
        assert answers(second) == answers(alone)


@pytest.mark.slow
def test_a_machine_has_its_own_of_many_engines() -> None:
    """They share this machine alone, and count where they stand among all."""
    many = {"data_parallel_size": 6, "data_parallel_size_local": 2, "data_parallel_start_rank": 2}
    asked = EngineConfig(model="bundled", device="cpu", **many, data_parallel_hybrid_lb=True)
    assert [each.data_parallel_rank for each in local_engine_configs(asked)] == [2, 3]
    assert "2 engines: a process each" in str(explain(asked))
    tiny = variant("llama", "plain")
    with engine(tiny) as alone, engine(tiny, **many, data_parallel_hybrid_lb=True) as llm:
        assert isinstance(llm._client.engine, DataParallelEngines) and len(llm._client.engine.children) == 2
        assert answers(llm) == answers(alone)


OFFLINE = """
import sys
from quintet import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, data_parallel_size=2, use_tqdm=False,
          kv_cache_memory_bytes="16M", max_model_len=64)
print("ready", *(each.pid for each in llm._client.engine.children), flush=True)
greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
while True:
    try:
        outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 6, greedy, use_tqdm=False)
        errors = {each.outputs[0].error for each in outputs} - {None}
        if errors:
            print(*errors, flush=True)
            sys.exit(9)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except RuntimeError as error:
        print(error, flush=True)
        sys.exit(9)
"""


def offline(tiny: Tiny) -> tuple["subprocess.Popen[str]", list[int]]:
    words = [sys.executable, "-c", OFFLINE, str(tiny.folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    ready, *engines = process.stdout.readline().split()
    assert ready == "ready"
    return process, [process.pid, *map(int, engines)]


def test_ctrl_c_interrupts_a_call_and_the_engines_go_on() -> None:
    process, processes = offline(variant("llama", "plain"))
    assert interrupted(process) == ["interrupted\n"] * 3
    assert until(lambda: gone(*processes), 10)


@pytest.mark.slow
def test_whichever_is_killed_whenever_nothing_hangs_and_nothing_is_left() -> None:
    tiny, draw = variant("llama", "plain"), random.Random(0)
    for turn in range(3):
        process, processes = offline(tiny)
        assert process.stdout is not None
        time.sleep(draw.random() * 0.3)
        victim = turn % 3
        os.kill(processes[victim], signal.SIGKILL)
        if victim:
            assert f"engine {victim - 1} of 2 has ended: it was killed by SIGKILL" in process.stdout.readline()
            assert process.wait(30) == 9
        else:
            process.wait(30)
        assert until(lambda left=processes: gone(*left), 10), f"turn {turn}: {processes}"  # type: ignore[misc]


FLAGS = ("--model", "bundled", "--device", "cpu", "-dp", "2", "--kv-cache-memory-bytes", "16M")
ASKED = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.mark.slow
def test_a_server_of_two_engines_answers_counts_and_ends_with_one() -> None:
    with LLM("bundled", device="cpu", use_tqdm=False, kv_cache_memory_bytes="16M") as alone:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        want = alone.generate(str(ASKED["prompt"]), params, use_tqdm=False)[0].outputs[0].text
    with Server(*FLAGS, "--api-workers", "2") as server:
        said = [httpx.post(server.url + "/v1/completions", json=ASKED, timeout=60) for _ in range(6)]
        assert {each.json()["choices"][0]["text"] for each in said} == {want}
        many = {**ASKED, "prompt": ["One", "Two", "Three", "Four"], "n": 2}
        choices = httpx.post(server.url + "/v1/completions", json=many, timeout=60).json()["choices"]
        assert [each["index"] for each in choices] == list(range(8))
        assert httpx.post(server.url + "/reset_prefix_cache", timeout=60).status_code == 200
        _metrics(server)
        engines = [each for each in server.children() if "quintet.engine.processes.engine_process" in words_of(each)]
        assert len(engines) == 2
        statuses: list[Any] = []
        long = {**ASKED, "max_tokens": 200}
        threads = [threading.Thread(target=_ask, args=(server.url, long, statuses)) for _ in range(4)]
        for each in threads:
            each.start()
        engines[1].kill()
        for each in threads:
            each.join(60)
        assert len(statuses) == 4
        assert until(lambda: server.process.poll() is not None, 60)
        assert server.process.returncode == 1
        assert "engine 1 of 2 has ended: it was killed by SIGKILL" in server.output
        assert all(f"INFO    engine {number}: 2 engines: a process each" in server.output for number in range(2))
        told = [each for each in statuses if each[0] == 503]
        assert all("engine 1 of 2 has ended" in each[1] for each in told)
        assert until(lambda: not any(each.is_running() for each in engines), 10)


def _ask(url: str, body: dict[str, Any], statuses: list[Any]) -> None:
    try:
        answer = httpx.post(url + "/v1/completions", json=body, timeout=60)
        statuses.append((answer.status_code, answer.text))
    except httpx.HTTPError as error:  # it came when the server had ended
        statuses.append((0, str(error)))


def _metrics(server: Server) -> None:
    """Of each engine, by its number."""

    def counts() -> list[float]:
        lines = httpx.get(server.url + "/metrics").text.splitlines()
        found = [each for each in lines if each.startswith("vllm:generation_tokens_total{")]
        assert [f'engine="{number}"' in line for number, line in enumerate(found)] == [True, True]
        return [float(each.rsplit(" ", 1)[1]) for each in found]

    assert until(lambda: sum(counts()) == 6 * 8 + 8 * 8 and all(counts()), 10)
    assert "quintet:engine_up 1.0" in httpx.get(server.url + "/metrics").text


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])  # two engines, and the server itself
def test_a_server_of_which_one_is_killed_at_any_moment_leaves_nothing(victim: int) -> None:
    draw = random.Random(victim)
    with Server(*FLAGS, "--api-workers", "2") as server:
        statuses: list[Any] = []
        long = {**ASKED, "max_tokens": 100}
        threads = [threading.Thread(target=_ask, args=(server.url, long, statuses)) for _ in range(4)]
        children = server.children()
        engines = [each for each in children if "quintet.engine.processes.engine_process" in words_of(each)]
        for each in threads:
            each.start()
        time.sleep(draw.random() * 0.4)
        os.kill([*(each.pid for each in engines), server.process.pid][victim], signal.SIGKILL)
        for each in threads:
            each.join(60)
        assert until(lambda: server.process.poll() is not None, 60)
        if victim < 2:
            assert server.process.returncode == 1
            assert f"engine {victim} of 2 has ended: it was killed by SIGKILL" in server.output
        assert len(statuses) == 4
        for status, text in statuses:
            assert status in (0, 200, 503) and (status != 503 or "has ended" in text)
        assert until(lambda: gone(*(each.pid for each in children)), 20)
