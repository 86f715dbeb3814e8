"""LMCache itself, where it is installed: a second process finds what the first has kept; what is gone is computed."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quintet.engine.client import EngineClient
from quintet.engine.kv_transfer.async_store import AsyncStoreConnector
from quintet.engine.kv_transfer.lmcache import store as lmcache_store
from quintet_tools.checkpoints.tiny import Tiny
from tests.e2e.engine.test_windows import tokens
from tests.e2e.kv_transfer.test_offloading import FORMS, asked, served
from tests.helpers.servers.serving import until

pytest.importorskip("lmcache.v1.storage_backend.storage_manager", reason="needs LMCache", exc_type=ImportError)

TINY = FORMS["llama"][0]
ROOM = {"max_local_cpu_size": 0.01}  # GiB
SCRIPT = """
import json, sys
from quintet import LLM, SamplingParams
folder, prompts, connector = json.loads(sys.argv[1])
with LLM(folder, device="cpu", skip_tokenizer_init=True, dtype="float32", num_pages=60, max_model_len=232,
         kv_transfer_config=connector) as llm:
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    said = llm.generate([{"prompt_token_ids": each} for each in prompts], greedy, use_tqdm=False)
    told = llm._client.engine.stats().kv_connector
print(json.dumps([[list(each.outputs[0].token_ids) for each in said], told.pages_loaded, told.pages_failed]))
"""


def connector(client: EngineClient) -> AsyncStoreConnector:
    assert client.engine.scheduler.kv_transfer is not None
    found = client.engine.scheduler.kv_transfer.connector
    assert isinstance(found, AsyncStoreConnector)
    return found


def kept(client: EngineClient) -> bool:
    """Whether LMCache has been handed all, and has taken it or refused."""
    assert client.engine.scheduler.kv_transfer is not None
    client.engine.scheduler.kv_transfer.after_compute(client.engine.scheduler, running=False)
    found = connector(client)
    return until(lambda: not (found._queued or found._busy))


@pytest.fixture
def engine() -> Iterator[Callable[..., EngineClient]]:
    made = list[EngineClient]()

    def make(tiny: Tiny = TINY, page_size: int = 16, **asked: Any) -> EngineClient:
        more = {"page_size": page_size, "kv_offloading_backend": "lmcache"}
        made.append(served(tiny, kv_offloading_lmcache={**ROOM, **asked}, **more))
        return made[-1]

    yield make
    for each in made:
        each.engine.close()


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_has_kept(tmp_path: Path) -> None:
    """By vLLM's name, as LMCache's own file says; the environment stays as it was."""
    file = tmp_path / "lmcache.yaml"
    file.write_text(
        f"chunk_size: 256\nlocal_cpu: false\nmax_local_cpu_size: 0.01\nremote_url: fs://h:1{tmp_path}/kept\n"
    )
    wanted = tokens(served(TINY), **asked(3))
    given = [str(TINY.folder), list(asked(3).values()), {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}]
    variables = {**os.environ, "LMCACHE_CONFIG_FILE": str(file)}
    for at in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(given)],
            env=variables,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ran.returncode == 0, ran.stderr
        said, loaded, failed = json.loads(ran.stdout)
        assert said == list(wanted.values())
        assert (loaded > 0) == (at == 1) and failed == 0


def test_pages_that_were_damaged_are_computed_and_written_anew(
    tmp_path: Path, engine: Callable[..., EngineClient]
) -> None:
    wanted, remote = tokens(served(TINY), **asked(2)), f"fs://h:1{tmp_path}/kept"
    first = engine(remote_url=remote, local_cpu=False)
    assert tokens(first, **asked(2)) == wanted and kept(first)
    files = sorted((tmp_path / "kept").iterdir())
    assert len(files) > 20
    for at, file in enumerate(files):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.write_bytes(content if at % 2 else content[:100])
    second = engine(remote_url=remote, local_cpu=False)
    assert tokens(second, **asked(2)) == wanted
    assert second.engine.stats().kv_connector.pages_failed > 0 and kept(second)
    assert "PROMETHEUS_MULTIPROC_DIR" not in os.environ, "LMCache's variable is left to what the process starts"


def test_the_same_checkpoint_elsewhere_finds_them_and_other_pages_do_not(
    tmp_path: Path, engine: Callable[..., EngineClient]
) -> None:
    """On another machine files have other places and times."""
    url = {"remote_url": f"fs://h:1{tmp_path}/kept"}
    first = engine(**url)
    wanted = tokens(first, **asked(2))
    assert kept(first)
    shutil.copytree(TINY.folder, tmp_path / "copied", copy_function=shutil.copy)
    copied = engine(dataclasses.replace(TINY, folder=tmp_path / "copied"), **url)
    assert tokens(copied, **asked(2)) == wanted and copied.engine.stats().kv_connector.pages_loaded == 2 * 12
    other = engine(page_size=8, **url)
    assert tokens(other, **asked(2)) == wanted and other.engine.stats().kv_connector.pages_loaded == 0


@pytest.mark.parametrize("local_cpu", [True, False])
def test_memory_for_few_pages_is_enough(local_cpu: bool, tmp_path: Path, engine: Callable[..., EngineClient]) -> None:
    """LMCache waits for room for ever, if nothing makes some."""
    wanted, few = tokens(served(TINY), **asked(3)), {"max_local_cpu_size": 1e-4, "local_cpu": local_cpu}
    first = engine(remote_url=f"fs://h:1{tmp_path}/kept", **few)
    assert tokens(first, **asked(3)) == wanted and kept(first)
    second = engine(remote_url=f"fs://h:1{tmp_path}/kept", **few)
    assert tokens(second, **asked(3)) == wanted
    told = second.engine.stats()
    assert told.kv_connector.pages_loaded == 3 * 12 and told.kv_connector.pages_failed == 0


def test_a_disk_of_lmcaches_keeps_what_its_memory_has_no_room_for(
    tmp_path: Path, engine: Callable[..., EngineClient]
) -> None:
    prompts, disk = asked(8), {"local_disk": str(tmp_path), "max_local_disk_size": 0.01, "max_local_cpu_size": 1e-4}
    client = engine(**disk)
    wanted = tokens(served(TINY), **prompts)
    assert tokens(client, **prompts) == wanted and kept(client)
    assert tokens(client, **prompts) == wanted, "from the disk"
    assert client.engine.stats().kv_connector.pages_loaded > 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Remote:
    """LMCache's own server."""

    def __init__(self, port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)], stderr=subprocess.DEVNULL
        )

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        assert until(listens), "LMCache's server does not listen"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.slow
def test_a_server_that_goes_costs_computing_alone_and_is_found_again(
    engine: Callable[..., EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, prompts = free_port(), asked(9)
    wanted, names = tokens(served(TINY), **prompts), list(prompts)
    several = [{name: prompts[name] for name in names[at : at + 3]} for at in (0, 3, 6)]
    remote = Remote(port)
    url = {"remote_url": f"lm://127.0.0.1:{port}", "local_cpu": False}
    try:
        first, second = engine(**url), engine(**url)
        said = tokens(first, **several[0])
        assert kept(first)
        said = tokens(second, **several[0])
        assert second.engine.stats().kv_connector.pages_loaded > 20
        remote.kill()
        said |= tokens(second, **several[1]) | tokens(first, **several[1])
        assert kept(first) and kept(second)
        remote = Remote(port)
        monkeypatch.setattr(lmcache_store, "RETRY_SECONDS", 0.0)
        said |= tokens(first, **several[2])
        assert kept(first)
        again = engine(**url)
        said |= tokens(again, **several[2])
        assert again.engine.stats().kv_connector.pages_loaded > 20, "what was computed after it came back is not there"
        assert said == wanted
    finally:
        remote.kill()
