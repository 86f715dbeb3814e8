"""Layers shared out over stages: they say what one process says, to the bit, fail as one, and leave nothing behind."""

import itertools
import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quintet import LLM, SamplingParams
from quintet.api.explain import explain
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.engine import Engine
from quintet.engine.input_processor import InputProcessor, ModelLimits
from quintet.engine.startup import launch, prepare
from quintet.interface.platform import DeviceLost
from quintet.interface.types import RankInfo
from quintet.layers.pipeline import Stage, layers_per_stage
from quintet.outputs import TokenLogprobs
from quintet.platforms.host import nameless_file
from quintet_tools.checkpoints.encoders import first as first_encoder
from quintet_tools.checkpoints.tiny import EVERY, FAMILIES, PLAIN, VOCAB, Tiny, make, variant
from tests.e2e.parallel.test_ranks import WIDE, pids
from tests.helpers.checkpoints.packed import gptq
from tests.helpers.platforms.engines import answers, engine
from tests.helpers.platforms.engines import told as everything
from tests.helpers.processes import gone
from tests.helpers.servers.serving import until

pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")

DEEP = {**PLAIN, "num_hidden_layers": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
SCORED = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False, logprobs=2, prompt_logprobs=1)
DRAWN = SamplingParams(
    temperature=1.0, seed=3, max_tokens=9, detokenize=False, presence_penalty=0.5, logprobs=2, ignore_eos=True
)
SMALL = {"max_num_batched_tokens": 32, "max_model_len": 128}  # prompts come in chunks, one behind the other
PROMPTS: list[Any] = [{"prompt_token_ids": ids} for ids in random_prompts(5, (17, 3, 70, 8, 9, 1, 40), VOCAB)]


def staged(tiny: Tiny, stages: int, **settings: Any) -> LLM:
    return engine(tiny, pipeline_parallel_size=stages, **settings)


def told(llm: LLM, params: SamplingParams = SCORED) -> list[Any]:
    return everything(llm, PROMPTS, params)


# what, how it is made, its settings: the layers of each are of two stages
MATRIX: dict[str, tuple[Callable[[], Tiny], dict[str, Any]]] = {
    "llama, tied": (lambda: make("llama", {**DEEP, "tie_word_embeddings": True}), {"dtype": "bfloat16"}),
    "qwen3": (lambda: make("qwen3", DEEP), {}),
    "gemma2, windows": (lambda: variant("gemma2", "plain"), {}),
    "gemma3, windows": (lambda: variant("gemma3_text", "plain"), {}),
    "qwen3_moe": (lambda: variant("qwen3_moe", "plain"), {}),
    "deepseek_v2": (lambda: variant("deepseek_v2", "plain"), {}),
    "granitemoehybrid, guessed tokens": (
        lambda: variant("granitemoehybrid", "plain"),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ),
    "mamba2": (lambda: variant("mamba2", "plain"), {}),
    "gpt2": (lambda: variant("gpt2", "scaled by depth"), {}),
    "opt": (lambda: variant("opt", "norm after, narrow"), {}),
    "rwkv7": (lambda: variant("rwkv7", "plain"), {}),
    "solar": (lambda: variant("solar", "plain"), {"dtype": "bfloat16"}),
    "zamba2": (lambda: variant("zamba2", "plain"), {"dtype": "bfloat16"}),
    "gemma3n, whose last layers read a cache in fp8": (
        lambda: variant("gemma3n_text", "plain"),
        {"kv_cache_dtype": "fp8", "calculate_kv_scales": True},
    ),
    "int4": (lambda: make("llama", WIDE), {"quantization": "int4"}),
    "gptq": (lambda: gptq(make("llama", WIDE), 4, 64), {}),
    "a cache in fp8 whose scales are computed": (
        lambda: make("llama", WIDE),
        {"kv_cache_dtype": "fp8", "calculate_kv_scales": True},
    ),
    "guessed tokens": (
        lambda: make("llama", WIDE),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ),
}


ALIKE = (
    "qwen3", "gemma2, windows", "qwen3_moe", "mamba2", "gpt2", "gptq", "a cache in fp8 whose scales are computed",
    "rwkv7", "solar", "zamba2", "gemma3n, whose last layers read a cache in fp8",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep if name in ALIKE else pytest.mark.slow) for name in MATRIX]
)
def test_stages_say_what_one_process_says_to_the_bit(name: str) -> None:
    made, settings = MATRIX[name]
    tiny, settings = made(), {**SMALL, **settings}
    with engine(tiny, **settings) as alone, staged(tiny, 2, **settings) as several:
        for params in (GREEDY if "speculative_config" in settings else SCORED, DRAWN):
            want = [told(alone, params) for _ in range(2)]
            assert [told(several, params) for _ in range(2)] == want  # again from recorded steps, and cached pages


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=str)
def test_stages_of_several_ranks_and_engines_of_stages(sizes: dict[str, int]) -> None:
    tiny = make("llama", WIDE)
    with engine(tiny) as alone, staged(tiny, 2, **sizes) as several:
        assert [answers(several) for _ in range(2)] == [answers(alone) for _ in range(2)]


@pytest.mark.slow
def test_stages_whose_ranks_keep_whole_experts() -> None:
    """What a checkpoint holds for layers of other stages is other ranks' as well."""
    tiny = make("mixtral", {**FAMILIES["mixtral"]["plain"], "num_hidden_layers": 4})
    with engine(tiny) as alone, staged(tiny, 2, tensor_parallel_size=2, enable_expert_parallel=True) as several:
        assert answers(several) == answers(alone)


def test_three_stages_live_as_one(tmp_path: Path) -> None:
    """One start for all of it: starting is what takes time."""
    tiny = make("llama", DEEP)
    with engine(tiny, **SMALL) as alone, staged(tiny, 3, **SMALL) as llm:
        assert "3 stages: embeddings and layers 0 to 0, layers 1 to 1" in " ".join(llm._client.engine_plan.reasons)
        want = told(alone)
        assert [told(llm) for _ in range(2)] == [want] * 2
        assert told(llm, DRAWN) == told(alone, DRAWN)
        for _ in llm.stream(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)):
            break  # requests are aborted
        llm.reset_prefix_cache()
        assert told(llm) == want
        llm.sleep(2)
        llm.wake_up()
        assert told(llm) == want
        llm.reload_weights()
        assert told(llm) == want
        llm.save_sharded_state(str(tmp_path / "sharded"))
        assert len(list((tmp_path / "sharded").glob("*.safetensors"))) == 3
        processes = pids(llm)
    assert until(lambda: gone(*processes), 10)


@pytest.mark.slow
def test_a_stage_that_dies_is_named_and_all_end() -> None:
    llm = staged(make("llama", DEEP), 2)
    processes = pids(llm)
    assert answers(llm)
    os.kill(processes[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 1 of 2 has ended: it was killed by SIGKILL"):
        for _ in range(100):
            answers(llm)
    llm.close()
    assert until(lambda: gone(*processes), 10)


class Threads:
    """The ranks of an engine as threads of this process, each with an engine as its process would have it."""

    def __init__(self, tiny: Tiny, stages: int, share: int = 1, **settings: Any) -> None:
        self._file = nameless_file()
        self.size = stages * share
        self._pool = ThreadPoolExecutor(self.size)
        small = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_model_len": 128, "device": "cpu"}
        config = EngineConfig(
            model=str(tiny.folder), skip_tokenizer_init=True, pipeline_parallel_size=stages, tensor_parallel_size=share,
            **{**small, **settings},
        )  # fmt: skip

        def start(rank: int) -> tuple[Any, Engine]:
            place = RankInfo(rank, self.size, f"shared://{self._file.fileno()}", stages)
            prepared = prepare(config, rank_info=place)
            return prepared, launch(prepared, progress=False)

        started = list(self._pool.map(start, range(self.size)))
        self.prepared, self.engines = [each for each, _ in started], [each for _, each in started]
        bounds = ModelLimits(
            self.prepared[0].vocab_size, self.prepared[0].memory_plan.max_model_len, config.max_logprobs
        )
        self._admission = InputProcessor(bounds, None, frozenset(), seed=0)
        self.said: dict[str, list[int]] = {}
        self.scored: dict[str, list[TokenLogprobs]] = {}
        self.ended: dict[str, str] = {}

    def add(self, name: str, ids: list[int], params: SamplingParams = GREEDY) -> None:
        [asked] = self._admission.admit(name, Prompt(ids), params)
        for each in self.engines:
            each.add(asked)
        self.said[name], self.scored[name] = [], []

    def abort(self, name: str) -> None:
        for each in self.engines:
            each.abort([name])

    def step(self) -> None:
        """Of all ranks, which are told the same."""
        first, *others = self._pool.map(lambda each: each.step(), self.engines)
        for each in others:
            assert [(delta.request_id, delta.token_ids, delta.error) for delta in each] == [
                (delta.request_id, delta.token_ids, delta.error) for delta in first
            ]
        for each in self.engines:
            each.check_integrity()
        for delta in first:
            self.said[delta.request_id] += delta.token_ids
            self.scored[delta.request_id] += [*(delta.prompt_logprobs or ()), *(delta.logprobs or ())]
            if delta.finish_reason:
                self.ended[delta.request_id] = delta.error or delta.finish_reason

    def run(self) -> None:
        while self.engines[0].busy:
            self.step()


@pytest.fixture(scope="module")
def deep() -> Tiny:
    return make("llama", DEEP)


@pytest.fixture(scope="module")
def wanted(deep: Tiny) -> dict[str, list[int]]:
    """What one process says."""
    with engine(deep, **SMALL) as alone:
        outputs = alone.generate(PROMPTS, GREEDY, use_tqdm=False)
        return {f"request {place}": list(each.outputs[0].token_ids) for place, each in enumerate(outputs)}


@pytest.fixture(scope="module")
def threads(deep: Tiny) -> Threads:
    return Threads(deep, 3, **SMALL)


def asked(threads: Threads) -> None:
    for place, prompt in enumerate(PROMPTS):
        threads.add(f"request {place}", prompt["prompt_token_ids"])


def test_as_many_steps_run_as_there_are_stages(threads: Threads, wanted: dict[str, list[int]]) -> None:
    asked(threads)
    most = 0
    while threads.engines[0].busy:
        threads.step()
        most = max(most, len(threads.engines[0]._in_flight))  # that are left running: one more runs within a call
    assert most == 2 and threads.said == wanted


def test_who_comes_and_goes_while_steps_run_changes_nothing_for_others(
    threads: Threads, wanted: dict[str, list[int]]
) -> None:
    draw = random.Random(1)
    for turn in range(3):
        waiting, left = [*range(len(PROMPTS))], set[int]()
        while waiting or threads.engines[0].busy:
            if waiting and draw.random() < 0.5:
                place = waiting.pop(0)
                threads.add(f"request {place}", PROMPTS[place]["prompt_token_ids"])
                if draw.random() < 0.3:
                    left.add(place)
            threads.step()
            for place in [each for each in left if draw.random() < 0.3]:
                threads.abort(f"request {place}")
            if turn == 1 and draw.random() < 0.1:
                for each in threads.engines:
                    each.reset_prefix_cache()
        for name, tokens in wanted.items():
            said = threads.said[name]
            assert said == tokens[: len(said)] and (len(said) == len(tokens) or int(name.split()[1]) in left)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_that_fails_in_one_stage_ends_who_is_in_it(
    threads: Threads, wanted: dict[str, list[int]], stage: int
) -> None:
    worker, count = threads.prepared[stage].ranks.workers[0], itertools.count()
    run = worker.run

    def broken(*arguments: Any) -> Any:
        if next(count) == 6:
            raise MemoryError("no room for activations")
        return run(*arguments)

    worker.run = broken  # type: ignore[method-assign]
    threads.ended.clear()
    asked(threads)
    threads.run()
    worker.run = run  # type: ignore[method-assign]
    failed = {name for name, why in threads.ended.items() if why != "length"}
    said = {threads.ended[name] for name in failed}
    assert said == {f"RankFailed: rank {stage} of 3: MemoryError: no room for activations"}
    assert len(failed) < len(PROMPTS)
    assert {name: tokens for name, tokens in threads.said.items() if name not in failed} == {
        name: tokens for name, tokens in wanted.items() if name not in failed
    }
    asked(threads)
    threads.run()
    assert threads.said == wanted


def test_a_step_that_fails_on_one_rank_of_a_stage_leaves_none_waiting() -> None:
    tiny = make("llama", WIDE)
    threads = Threads(tiny, 2, share=2)
    worker = threads.prepared[2].ranks.workers[0]
    run, count = worker.model.forward, itertools.count()
    threads.add("first", [5, 6, 7])
    threads.run()

    def broken(*arguments: Any) -> Any:
        if next(count) == 2:
            raise MemoryError("no room for activations")
        return run(*arguments)

    for each in threads.prepared:  # a recorded step would not call it
        each.ranks.workers[0].main.allow_recorded(False)
    worker.model.forward = broken  # type: ignore[method-assign]
    threads.add("second", [5, 6, 7])
    threads.run()
    assert threads.ended["second"] == "RankFailed: rank 2 of 4: MemoryError: no room for activations"
    threads.add("third", [5, 6, 7])
    threads.run()
    assert threads.said["third"] == threads.said["first"] and len(threads.said["first"]) == 9


def test_ranks_that_drew_other_tokens_are_no_longer_one_model(deep: Tiny) -> None:
    threads = Threads(make("llama", WIDE), 2, share=2)
    runner = threads.engines[3]._runner._inner  # type: ignore[attr-defined]
    draw = runner.sample
    runner.sample = lambda forward: lambda: draw(forward)()._replace(token_ids=[1])
    threads.add("first", [5, 6, 7])
    with pytest.raises(DeviceLost, match="the ranks' step 1 differs"):
        threads.run()


def test_explain_says_which_layers_are_where() -> None:
    page = str(explain(EngineConfig(model="bundled", device="cpu", pipeline_parallel_size=2)))
    assert "2 ranks in 2 stages: a process each" in page and "embeddings and layers 0 to" in page


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("llama", {"pipeline_parallel_size": 17}, "pipeline_parallel_size 17: at most 16 ranks"),
        ("llama", {"pipeline_parallel_size": 16}, "16 is more than the model's . layers; lower it to . or less"),
        ("llama", {"pipeline_parallel_size": 2, "device": "null"}, "must be 1 on platform null"),
        ("bert", {"pipeline_parallel_size": 2}, "must be 1 for bert models, which take a text in one step"),
    ],
)
def test_what_cannot_be_shared_out_says_why(family: str, settings: dict[str, Any], says: str) -> None:
    tiny = variant(family, next(iter(EVERY[family]))) if family in EVERY else first_encoder(family)
    with pytest.raises(ValueError, match=says):
        explain(EngineConfig(model=str(tiny.folder), skip_tokenizer_init=True, **{"device": "cpu", **settings}))


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(4, 2, (2, 2)), (7, 2, (4, 3)), (10, 4, (2, 3, 3, 2)), (3, 3, (1, 1, 1)), (11, 4, (3, 3, 3, 2)), (5, 1, (5,))],
)
def test_what_is_left_over_goes_to_stages_before_the_last(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    assert layers_per_stage(layers, stages) == counts
    places = [place for index in range(stages) for place in Stage(index, counts).layers]
    assert places == [*range(layers)]
