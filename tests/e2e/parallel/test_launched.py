"""Ranks that others start: processes of torchrun, which all make the same calls, and Ray's actors."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from quintet import LLM, SamplingParams
from quintet.config import EngineConfig
from quintet.engine.parallel.external_launcher import LauncherEnvironment, launcher_environment
from quintet.engine.parallel.ray import cluster_address, rank_resources
from quintet.engine.startup import prepare
from quintet.interface.platform import Capabilities
from quintet.platforms import SelectedPlatform
from tests.helpers.lora_adapters import bundled_adapter
from tests.helpers.platforms.loopback import LoopbackPlatform
from tests.helpers.processes import gone
from tests.helpers.servers.serving import Server, until, words_of

pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")

EXAMPLES = Path(__file__).parents[3] / "examples" / "machines"
SMALL: dict[str, Any] = {
    "device": "cpu", "kv_cache_memory_bytes": "16M", "max_model_len": 256, "use_tqdm": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

SCRIPT = """
import os, sys
from quintet import LLM, SamplingParams
rank = os.environ["RANK"]
llm = LLM("bundled", device="cpu", kv_cache_memory_bytes="16M", max_model_len=256, use_tqdm=False,
          distributed_executor_backend="external_launcher", tensor_parallel_size=2)
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
def say(*words):
    sys.stdout.write(" ".join(map(str, (rank, *words))) + "\\n")  # one piece: both write to one pipe, unbuffered
[output] = llm.generate("Once upon a time", greedy, use_tqdm=False)
say("first", output.outputs[0].text)
for _ in llm.stream("One day", SamplingParams(max_tokens=40, ignore_eos=True)):
    break
drawn = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
say("drawn", *[each.outputs[0].token_ids for each in llm.generate(["The dog"] * 2, drawn, use_tqdm=False)])
llm.sleep(1); llm.wake_up()
say("awake", llm.generate("Once upon a time", greedy, use_tqdm=False)[0].outputs[0].text)
try:
    llm.generate("Once upon a time" if rank == "0" else "Twice upon a time", greedy, use_tqdm=False)
except RuntimeError as error:
    say("differs", error)
"""


def by_torchrun(script: Path, ranks: int) -> str:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script)]
    environment = {**os.environ, "QUINTET_RANKS_KEY": "of these tests alone"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_every_process_of_torchrun_gets_the_same_and_is_told_where_calls_differ(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    said = by_torchrun(tmp_path / "script.py", 2).splitlines()
    first, second = (sorted(line[2:] for line in said if line.startswith(rank)) for rank in "01")
    assert first == second and [line.split()[0] for line in first] == ["awake", "differs", "drawn", "first"]
    assert "rank 1 of 2 was asked something else than rank 0 before step" in first[1]
    with LLM("bundled", **SMALL) as alone:
        [output] = alone.generate("Once upon a time", GREEDY, use_tqdm=False)
    assert first[3] == f"first {output.outputs[0].text}" and first[0] == f"awake {output.outputs[0].text}"


ADAPTERS = """
import os, sys
from pathlib import Path
from quintet import LLM, LoRARequest, SamplingParams
rank, folder = os.environ["RANK"], Path(sys.argv[0]).parent
llm = LLM("bundled", device="cpu", kv_cache_memory_bytes="16M", max_model_len=256, use_tqdm=False, enable_lora=True,
          distributed_executor_backend="external_launcher", tensor_parallel_size=2)
greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
def say(*words):
    sys.stdout.write(" ".join(map(str, (rank, *words))) + "\\n")
for path in (folder / "adapter" if rank == "0" else folder / "nowhere", folder / "adapter"):
    try:
        [output] = llm.generate("One day", greedy, use_tqdm=False, lora_request=LoRARequest("sql", 1, str(path)))
        say("tokens", output.outputs[0].token_ids)
    except ValueError as error:
        say("refused", error)
"""


@pytest.mark.slow
def test_an_adapter_that_one_process_of_torchrun_cannot_read_is_refused_by_all(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ADAPTERS)
    bundled_adapter(tmp_path / "adapter", seed=1)
    lines = by_torchrun(tmp_path / "script.py", 2).splitlines()
    first, second = (sorted(line[2:] for line in lines if line.startswith(rank)) for rank in "01")
    assert first == second and first[0].startswith("refused the adapter 'sql' cannot be served: rank 1: ")
    assert len(first) == 2 and first[1].startswith("tokens [")


SAID = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"RANK": ""}, "says no RANK; start the script by torchrun"),
        ({"WORLD_SIZE": "", "MASTER_ADDR": ""}, "says no WORLD_SIZE, MASTER_ADDR; start"),
        ({"RANK": "x"}, "RANK is 'x', and no number"),
        ({"RANK": "4"}, "rank 4 of 4, 2 on each"),
        ({"LOCAL_WORLD_SIZE": "3"}, "rank 3 of 4, 3 on each"),
    ],
)
def test_what_a_launcher_leaves_out_is_named(change: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        launcher_environment({**SAID, **change})


def test_what_a_launcher_says_is_taken() -> None:
    assert launcher_environment(SAID) == LauncherEnvironment(3, 4, 2, "here", 29500, False, "0")
    assert launcher_environment({**SAID, "TORCHELASTIC_USE_AGENT_STORE": "True"}).has_store


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, and the launcher has started 4 processes"),
        ({"tensor_parallel_size": 4, "data_parallel_size": 2}, "leave data_parallel_size and kv_events_config out"),
    ],
)
def test_settings_that_are_not_the_launchers_are_refused(
    settings: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SAID.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        LLM("bundled", **SMALL, **settings, distributed_executor_backend="external_launcher")


def test_a_platform_whose_ranks_are_threads_says_so() -> None:
    facts = LoopbackPlatform.probe()
    assert isinstance(facts, Capabilities)
    for settings, says in (
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend='ray': on this platform"),
        ({"distributed_executor_backend": "mp"}, "distributed_executor_backend='mp': on this platform"),
        ({"nnodes": 2}, "ranks are of one machine on this platform"),
    ):
        config = EngineConfig.from_kwargs(model="bundled", tensor_parallel_size=2, **settings)
        with pytest.raises(ValueError, match=says):
            prepare(config, SelectedPlatform(LoopbackPlatform, facts, "for a test"))


def test_bundles_are_what_a_rank_takes() -> None:
    assert rank_resources(Capabilities(devices=8, dtypes=()), 4) == {"GPU": 1.0}
    shared = Capabilities(devices=16, dtypes=(), processes=True, ray_resources={"CPU": 12.0})
    assert (rank_resources(shared, 4), rank_resources(shared, 16)) == ({"CPU": 3.0}, {"CPU": 1.0})


THERE = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(THERE, reason="Ray is installed")
def test_without_ray_the_remedy_is_said() -> None:
    with pytest.raises(ValueError, match=r"needs Ray, which is not installed; pip install '.*\[ray\]'"):
        LLM("bundled", **SMALL, tensor_parallel_size=2, distributed_executor_backend="ray")


needs_ray = pytest.mark.skipif(not THERE, reason="needs Ray: pip install 'quintet-llm[ray]'")


@needs_ray
def test_a_ray_cluster_that_does_not_answer_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray itself would wait for minutes, and end the process."""
    here = importlib.import_module("ray.util").get_node_ip_address()
    with socket.socket() as nobody:
        nobody.bind((here, 0))
        address = f"{here}:{nobody.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ValueError, match=f"no Ray cluster answers at {address}, which RAY_ADDRESS says"):
            cluster_address()
        monkeypatch.delenv("RAY_ADDRESS")
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)  # what one that was killed leaves
        assert cluster_address() is None and f"at {address}, does not answer" in caplog.text
        nobody.listen()
        assert cluster_address() == address


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize("how", ["ray.kill", "SIGKILL"])
def test_rays_actors_say_what_one_process_says_and_a_lost_one_is_named(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with LLM("bundled", **SMALL) as alone:
        want = [each.outputs[0].text for each in alone.generate(["Once upon a time", "The dog"], GREEDY)]
    ray: Any = importlib.import_module("ray")
    llm = LLM("bundled", **SMALL, tensor_parallel_size=2, distributed_executor_backend="ray")
    assert [each.outputs[0].text for each in llm.generate(["Once upon a time", "The dog"], GREEDY)] == want
    of_ray = psutil.Process().children(recursive=True)
    [actor] = [each for each in of_ray if "RankActor" in " ".join(each.cmdline())]
    others: Any = llm._client.engine_plan.ranks.remote_ranks
    if how == "ray.kill":
        ray.kill(others._actors[0])
    else:
        actor.kill()
    with pytest.raises(
        RuntimeError, match=rf"rank 1 of 2 (is lost|has ended: its actor died \(process {actor.pid} on )"
    ):
        for _ in range(1000):
            llm.generate("Once upon a time", GREEDY)
    llm.close()
    assert not ray.is_initialized()
    assert until(lambda: gone(*(each.pid for each in of_ray)), 30), [each for each in of_ray if each.is_running()]


@pytest.mark.slow
@needs_ray
def test_a_server_with_rays_actors_ends_in_good_order_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    flags = ("-tp", "2", "--distributed-executor-backend", "ray", "--kv-cache-memory-bytes", "16M")
    with Server("bundled", "--device", "cpu", "--max-model-len", "256", *flags) as server:
        assert server.complete().status_code == 200
        assert any("RankActor" in " ".join(words_of(each)) for each in server.children())
        assert server.stop() == 0 and not server.leftovers(20) and "Traceback" not in server.output


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize(("name", "needs"), [("ray_data.py", "pyarrow"), ("ray_serve.py", "starlette")])
def test_examples_for_ray_run(name: str, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(needs)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "Once upon a time" in done.stdout, done.stderr[-2000:]
