"""A prompt computed by one engine and gone on with by another, over TCP: the same numbers as from one engine."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from quintet import SamplingParams
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig, KVTransferConfig
from quintet.distributed.keys import kv_transfer_key
from quintet.engine.client import EngineClient
from quintet.engine.observability.stats import PageTransferStats
from quintet.outputs import RequestOutput
from quintet_tools.checkpoints.tiny import FAMILIES, PLAIN, make
from tests.e2e.engine.test_windows import prompt
from tests.e2e.kv_transfer.test_offloading import FORMS, LENGTH
from tests.e2e.kv_transfer.test_offloading import served as of_cpu
from tests.helpers.platforms import tpu
from tests.helpers.platforms.null_engine import drain
from tests.helpers.servers.serving import until

BOTH = {"kv_connector": "TCPConnector", "kv_role": "kv_both", "kv_port": 0}
LENDS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_block_ids": None}


def served(form: str, **more: Any) -> EngineClient:
    tiny, settings = FORMS[form]
    return of_cpu(tiny, **{**settings, "num_pages": 160, "kv_transfer_config": BOTH, **more})


def ask(client: EngineClient, ids: list[int], pages: Any = None, **more: Any) -> RequestOutput:
    extra = None if pages is None else {"kv_transfer_params": pages}
    asked = {"temperature": 0, "max_tokens": 12, "detokenize": False, "ignore_eos": True, "logprobs": 2, **more}
    params = SamplingParams(**asked, extra_args=extra)
    client.add("a", Prompt(ids), params)
    return drain(client)["a"]


def transferred(first: EngineClient, second: EngineClient, ids: list[int], **more: Any) -> RequestOutput:
    """As a proxy does it."""
    told = ask(first, ids, LENDS, max_tokens=1).kv_transfer_params
    assert told is not None and told["do_remote_prefill"]
    return ask(second, ids, told, **more)


def said(output: RequestOutput) -> Any:
    return [(each.token_ids, each.logprobs) for each in output.outputs]


@pytest.mark.parametrize(
    "form", ["llama", "llama, bfloat16", "llama, int8", "llama, odd pages", "gemma3_text", "deepseek_v3"]
)
def test_what_the_second_says_is_to_the_bit_what_one_engine_says(form: str) -> None:
    """Behind windows, pages are kept as long as the second engine needs them."""
    first, second, alone = served(form), served(form), served(form, kv_transfer_config=None)
    for at, length in enumerate((LENGTH, 96, 97, 3)):
        ids = prompt(at, length)
        if length == 3:
            assert ask(first, ids, LENDS, max_tokens=1).kv_transfer_params is None, "there is no whole page"
            continue
        got = transferred(first, second, ids, n=2 if at == 0 else 1)
        assert said(got) == said(ask(alone, ids, n=2 if at == 0 else 1))
        size = second.config.page_size
        assert got.num_cached_tokens == (length - 1) // size * size
    assert second.engine.stats().kv_connector.pages_failed == 0
    for client in (first, second, alone):
        client.close()


@pytest.mark.parametrize("connector", ["NixlConnector", "MooncakeConnector"])
def test_libraries_move_pages_between_engines(connector: str, tmp_path: Path) -> None:
    """Mooncake listens at all addresses for the time of the test."""
    pytest.importorskip("nixl" if connector == "NixlConnector" else "mooncake.engine")
    ways = {**BOTH, "kv_connector": connector, "kv_buffer_device": "cpu"}
    if connector == "MooncakeConnector":
        file = tmp_path / "key"
        file.write_text("a" * 32)
        file.chmod(0o600)
        extra = {"host": "127.0.0.1", "key_file": str(file)}
        ways.update(kv_ip="0.0.0.0", kv_connector_extra_config=extra)
    framed = {
        **BOTH,
        "kv_connector_extra_config": {"key_file": ways.get("kv_connector_extra_config", {}).get("key_file")},
    }
    first, second, third = (served("llama", kv_transfer_config=each) for each in (ways, ways, framed))
    for at in range(3):
        got, wanted = transferred(first, second, prompt(at, 90)), ask(first, prompt(at, 90))
        assert said(got) == said(wanted) and got.num_cached_tokens == 80
    assert until(lambda: counts(second).bytes_taken == counts(first).bytes_given > 0)
    assert transferred(first, third, prompt(4, 90)).num_cached_tokens == 0, "the other side takes no frames"
    for client in (first, second, third):
        client.close()


def counts(client: EngineClient) -> PageTransferStats:
    return client.engine.stats().page_transfer


def test_engines_of_one_machine_share_memory_and_nobody_else_of_it() -> None:
    here = {"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both"}
    named = {**here, "engine_id": f"test-{os.getpid()}"}
    first, second = served("llama", kv_transfer_config=named), served("llama", kv_transfer_config=here)
    folder = Path(tempfile.gettempdir()) / f"quintet-kv-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / named["engine_id"]).is_socket()
    for at in range(3):
        got, wanted = transferred(first, second, prompt(at, 90)), ask(first, prompt(at, 90))
        assert said(got) == said(wanted) and got.num_cached_tokens == 80
    assert until(lambda: counts(second).bytes_taken == counts(first).bytes_given > 0)
    with pytest.raises(ValueError, match="is another engine's that runs"):
        served("llama", kv_transfer_config=named)
    for wrong in ("../x", "a/b", "no-such-engine"):
        told = {"do_remote_prefill": True, "remote_host": wrong, "remote_port": 1, "remote_request_id": "x"}
        assert ask(second, prompt(9, 40), told).num_cached_tokens == 0
        second.engine.reset_prefix_cache()
    for client in (first, second):
        client.close()
    assert not (folder / named["engine_id"]).exists()


@pytest.fixture(scope="module")
def llamas() -> Any:
    clients = [served("llama"), served("llama")]
    yield clients
    for client in clients:
        client.close()


def test_a_peer_of_another_model_gives_nothing_and_costs_a_computation(llamas: list[EngineClient], caplog: Any) -> None:
    other = served("mistral")
    told = ask(other, prompt(0, 50), LENDS, max_tokens=1).kv_transfer_params
    wanted = ask(llamas[0], prompt(0, 50))
    llamas[1].engine.reset_prefix_cache()
    assert said(ask(llamas[1], prompt(0, 50), told)) == said(wanted)
    assert "are given" in caplog.text or "one runs another model" in caplog.text
    other.close()
    llamas[1].engine.reset_prefix_cache()
    assert said(ask(llamas[1], prompt(0, 50), told)) == said(wanted), "nor does one that is gone"


def test_a_reset_of_either_cache_changes_nothing_and_other_weights_do(
    llamas: list[EngineClient], tmp_path: Path
) -> None:
    first, second = llamas
    wanted = ask(second, prompt(7, 60))
    second.engine.reset_prefix_cache()
    first.engine.reset_prefix_cache()
    assert transferred(first, second, prompt(7, 60)).num_cached_tokens == 48
    other = make("llama", {**PLAIN, "max_position_embeddings": 512}, seed=5)
    second.reload_weights(str(other.folder))
    changed = ask(second, prompt(8, 60))
    second.engine.reset_prefix_cache()
    got = transferred(first, second, prompt(8, 60))
    assert got.num_cached_tokens == 0 and said(got) == said(changed)
    first.reload_weights(str(other.folder))
    assert transferred(first, second, prompt(8, 59)).num_cached_tokens == 48, "both have the others now"
    for client in llamas:
        client.reload_weights()
    second.engine.reset_prefix_cache()
    assert said(transferred(first, second, prompt(7, 60))) == said(wanted)


@tpu.needs_jax
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_other_devices_go_on_with_pages_of_the_cpu_and_the_cpu_with_theirs(devices: int) -> None:
    """In float32: two implementations add in another order. Two devices share out the heads; a page has all of them."""
    tiny = make("llama", {**FAMILIES["llama"]["plain"], "max_position_embeddings": 512})
    settings = {"dtype": "float32", "max_model_len": 64, "num_pages": 40, "max_num_batched_tokens": 16,
                "kv_transfer_config": BOTH}  # fmt: skip
    cpu = of_cpu(tiny, **settings)
    config = EngineConfig.from_kwargs(
        model=str(tiny.folder), device="tpu", skip_tokenizer_init=True, tensor_parallel_size=devices,
        compilation_cache_dir=tpu.programs().name, max_num_seqs=1, **settings,
    )  # fmt: skip
    other = EngineClient(config, progress=False)
    for first, second, at in ((cpu, other, 1), (other, cpu, 2)):
        alone = ask(cpu, prompt(at, 40))
        cpu.engine.reset_prefix_cache()
        got = transferred(first, second, prompt(at, 40), logprobs=None)
        assert got.num_cached_tokens == 32 and second.engine.stats().kv_connector.pages_failed == 0
        assert got.outputs[0].token_ids == alone.outputs[0].token_ids
    for client in (cpu, other):
        client.close()


def test_keys_are_kept_to_their_owners_and_binds_beyond_loopback_need_one(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("a" * 32 + "\n")
    file.chmod(0o644)
    for extra, why in (({"key_file": str(file)}, "can be read by others"), ({"key_file": "nowhere"}, "cannot be read")):
        with pytest.raises(ValueError, match=why):
            served("llama", kv_transfer_config={**BOTH, "kv_connector_extra_config": extra})
    file.chmod(0o600)
    assert kv_transfer_key(KVTransferConfig(kv_connector_extra_config={"key_file": str(file)})) == b"a" * 32
    with pytest.raises(ValueError, match="others could take pages, which are prompts"):
        served("llama", kv_transfer_config={**BOTH, "kv_ip": "0.0.0.0"})
    extra = {"key_file": str(file)}
    with pytest.raises(ValueError, match="give host in kv_connector_extra_config"):
        served("llama", kv_transfer_config={**BOTH, "kv_ip": "0.0.0.0", "kv_connector_extra_config": extra})
    with pytest.raises(ValueError, match="a page takes .* and none fits"):
        served("llama", kv_transfer_config={**BOTH, "kv_buffer_size": 10})


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_pages_of_an_engine_that_is_not_listed_are_not_asked_for(
    policy: str, tmp_path: Path, llamas: list[EngineClient], caplog: Any
) -> None:
    file = tmp_path / "key"
    file.write_text("a" * 32)
    file.chmod(0o600)
    keyed = {**BOTH, "kv_connector_extra_config": {"key_file": str(file)}, "kv_load_failure_policy": policy}
    extra = {"key_file": str(file), "peers": ["10.0.0.0/8", "127.0.0.1:1"]}
    first = served("llama", kv_transfer_config=keyed)
    assert "pages are asked of any host that a request names; list those that may be" in caplog.text
    caplog.clear()
    second = served("llama", kv_transfer_config={**keyed, "kv_connector_extra_config": extra})
    assert "any host" not in caplog.text
    got, wanted = transferred(first, second, prompt(3, 90)), ask(llamas[0], prompt(3, 90))
    if policy == "recompute":
        assert said(got) == said(wanted) and got.num_cached_tokens == 0
        assert "kv_connector_extra_config.peers does not name it" in caplog.text
    else:
        assert "kv_connector_extra_config.peers does not name it" in str(got)
    for client in (first, second):
        client.close()
    with pytest.raises(ValueError, match="engines of this machine and user are the only ones"):
        here = {"kv_connector": "SharedMemoryConnector", "kv_role": "kv_consumer"}
        served("llama", kv_transfer_config={**here, "kv_connector_extra_config": {"peers": ["a"]}})


def test_prompts_without_room_wait_for_nobody_and_leases_end() -> None:
    small = {**BOTH, "kv_buffer_size": 2**19}
    brief = {**BOTH, "kv_connector_extra_config": {"lease_seconds": 0.001}}
    first, hasty = served("llama", kv_transfer_config=small), served("llama", kv_transfer_config=brief)
    told = [ask(first, prompt(at, LENGTH), LENDS, max_tokens=1).kv_transfer_params for at in range(9)]
    assert None in told and told[0] is not None and first.engine.stats().page_transfer.loans_refused == told.count(None)
    left = ask(hasty, prompt(0, LENGTH), LENDS, max_tokens=1).kv_transfer_params
    loans = hasty.engine.scheduler.kv_transfer.p2p_transfer.send_buffer  # type: ignore[union-attr]
    assert loans is not None
    while len(loans):
        loans.expire()
    second = served("llama")
    got = ask(second, prompt(0, LENGTH), left)
    assert got.num_cached_tokens == 0 and said(got) == said(ask(first, prompt(0, LENGTH)))
    for client in (first, second, hasty):
        client.close()
