"""The CUDA platform on a real GPU, beside the CPU platform; where there is none, these are left out.

In float32: two implementations add in another order, and half precision would show it.
"""

import gc
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from quintet.config import EngineConfig
from quintet.conformance.harness.worker_runner import RankInfo, random_prompts
from quintet.engine.client import EngineClient
from quintet.interface.platform import Capabilities
from quintet.platforms.cuda import PLATFORM
from quintet.platforms.gpu import custom_all_reduce as small_sum
from quintet.platforms.gpu.comm import GroupCommunicator, InProcessStores, process_group
from quintet.platforms.gpu.device import GPUDevice
from quintet.platforms.gpu.graphs import GraphedStep
from quintet.platforms.gpu.memory import TaggedMemory
from quintet.platforms.gpu.runtime import TorchRuntime
from quintet_tools.checkpoints.tiny import VARIANTS, VOCAB, variant
from tests.e2e.engine.test_oracle import ENGINES, MODELS, client, mix, run
from tests.helpers.platforms.run_model import Runner
from tests.platforms.gpu.test_comm import each_rank

FACTS = PLATFORM.probe()
DEVICES = FACTS.devices if isinstance(FACTS, Capabilities) else 0
pytestmark = pytest.mark.skipif(not DEVICES, reason=f"no GPU: {FACTS if not DEVICES else ''}")
needs_two = pytest.mark.skipif(DEVICES < 2, reason="one GPU")

PROMPTS = random_prompts(8, (23, 1, 40, 7), VOCAB)


def platform(**settings: Any) -> Any:
    return PLATFORM(PLATFORM.configure(EngineConfig(**settings))[0])


@pytest.mark.parametrize(("family", "name"), VARIANTS)
def test_every_family_gives_the_cpu_platforms_tokens(family: str, name: str) -> None:
    """A recurrent state adds its tokens one after the other, so that what differs in the last digit grows with them."""
    share = 5e-4 if family == "qwen3_next" else 2e-4
    wanted, got = (Runner(variant(family, name), platform=each) for each in (None, platform(max_num_seqs=8)))
    for ours, theirs in zip(got.prompts(PROMPTS), wanted.prompts(PROMPTS), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=share * float(theirs.std()))
    assert got.greedy(PROMPTS, 6) == wanted.greedy(PROMPTS, 6)


def tokens(result: Any) -> Any:
    return {name: [(ids, why) for ids, why, *_ in completions] for name, (completions, _) in result.items()}


@pytest.mark.parametrize("model", [each for each in MODELS if each[2] == "float32" and not each[3]], ids=str)
@pytest.mark.parametrize("how", ENGINES)
def test_the_oracle(how: str, model: Any) -> None:
    """Batched, chunked, preempted, from the cache, captured: the tokens of the CPU platform, drawn ones too."""
    ours: EngineClient = client(model, device="cuda", **ENGINES[how])
    theirs = client(model, **ENGINES[how])
    for seed in range(3):
        assert tokens(run(ours, mix(seed))) == tokens(run(theirs, mix(seed))), f"mix {seed}"


def test_decoding_is_captured_and_replayed() -> None:
    made = platform(max_num_seqs=8)
    steps: list[GraphedStep] = []
    compiled = GraphedStep.__init__

    def note(self: GraphedStep, *args: Any) -> None:
        compiled(self, *args)
        steps.append(self)

    GraphedStep.__init__ = note  # type: ignore[method-assign]
    try:
        runner = Runner(variant("llama", "plain"), torch.bfloat16, platform=made)
    finally:
        GraphedStep.__init__ = compiled  # type: ignore[method-assign]
    runner.greedy(PROMPTS, 12)
    assert steps[0].refused is None and len(steps[0]._graphs) == 1


def test_results_come_home_behind_the_next_step() -> None:
    """The copy's own stream waits for what was queued before it, and for nothing that comes after."""
    device = GPUDevice(TorchRuntime(torch.cuda, "cuda"), 0)
    (x,) = device.to_device([np.arange(1000, dtype=np.int32)])
    wait = device.to_host(x * 2)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(200):
        busy = busy @ busy * 1e-2
    later = torch.cuda.Event()
    later.record()
    assert torch.equal(wait(), torch.arange(1000, dtype=torch.int32) * 2)
    assert not later.query(), "what was queued later is still running"


def test_asleep_the_memory_is_everybodys() -> None:
    runner = Runner(variant("llama", "plain"), platform=platform(max_num_seqs=8))
    before = runner.greedy(PROMPTS, 4)
    memory: TaggedMemory = runner.worker.device.tagged_memory  # type: ignore[attr-defined]
    gc.collect()
    held = torch.cuda.memory_allocated()
    freed = memory.sleep(1)
    assert freed > 0 and torch.cuda.memory_allocated() <= held - freed
    memory.wake()
    assert runner.greedy(PROMPTS, 4) == before


@needs_two
def test_two_gpus_give_the_tokens_of_one() -> None:
    wanted = Runner(variant("llama", "plain"), platform=platform()).greedy(PROMPTS, 6)
    made = platform(tensor_parallel_size=2, max_num_seqs=8)

    def work(rank: int) -> Any:
        place = RankInfo(rank, 2, "inproc://here")
        return Runner(variant("llama", "plain"), platform=made, rank_info=place).greedy(PROMPTS, 6)

    assert each_rank(2, work) == [wanted] * 2


@needs_two
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_small_sums_are_the_sum_in_rank_order(dtype: torch.dtype) -> None:
    library = small_sum.load()
    if isinstance(library, str):
        pytest.skip(library)
    meeting = InProcessStores()

    def work(rank: int) -> list[Any]:
        torch.cuda.set_device(rank)
        store = meeting.store(rank, 2, "inproc://sums")
        comm = GroupCommunicator(
            process_group("NCCL", dist.PrefixStore("nccl", store), rank, 2), rank, 2,
            small_sum.join(library, store, rank, 2, lambda: torch.cuda.current_stream().cuda_stream),  # type: ignore[arg-type]
        )  # fmt: skip
        found = []
        for turn in range(300):
            x = torch.randn(8 * (turn % 40 + 1), generator=torch.Generator().manual_seed(1000 * turn + rank)).to(dtype)
            found.append(comm.all_reduce(x.to(f"cuda:{rank}")).cpu())
        return found

    for turn, sums in enumerate(zip(*each_rank(2, work), strict=True)):
        parts = [
            torch.randn(8 * (turn % 40 + 1), generator=torch.Generator().manual_seed(1000 * turn + rank)).to(dtype)
            for rank in range(2)
        ]
        want = (parts[0].float() + parts[1].float()).to(dtype)
        assert all(torch.equal(each, want) for each in sums)
