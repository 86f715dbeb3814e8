"""Pages between engines of ranks that are processes: each takes its part of whoever has it, or all compute it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quintet import LLM
from quintet.config import KVTransferConfig
from quintet.engine.kv_transfer.factory import _check_machines
from quintet.engine.kv_transfer.p2p.send_buffer import SendBuffer
from quintet.outputs import RequestOutput
from tests.e2e.engine.test_windows import GREEDY, prompt
from tests.e2e.kv_transfer.test_offloading import FORMS, LENGTH, of_ranks, served, tokens
from tests.e2e.kv_transfer.test_transfer import BOTH, LENDS
from tests.e2e.parallel.test_nodes import engine as bundled
from tests.e2e.parallel.test_nodes import flags, following, free_port, led
from tests.helpers.servers.serving import until

HERE = {"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "engine_id": f"ranks-{os.getpid()}"}


def engine(**more: Any) -> LLM:
    return of_ranks(**{"num_pages": 60, "kv_transfer_config": BOTH, **more})


def ask(llm: LLM, ids: list[int], pages: Any = None, count: int = 0) -> RequestOutput:
    params = GREEDY.clone()
    params.max_tokens, params.extra_args = count or params.max_tokens, pages and {"kv_transfer_params": pages}
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return output


def wanted(ids: list[int], family: str = "llama") -> list[int]:
    """What one process says."""
    return tokens(served(FORMS[family][0], **FORMS[family][1]), a=ids)["a"]


@pytest.fixture
def ways(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Mooncake listens at all addresses for the time of a test, and wants a key."""
    (key := tmp_path / "key").touch(0o600)
    key.write_text("a" * 32)
    everywhere = {"kv_ip": "0.0.0.0", "kv_connector_extra_config": {"host": "127.0.0.1", "key_file": str(key)}}
    return {
        "TCP": BOTH, "shared memory": HERE, "NIXL": {**BOTH, "kv_connector": "NixlConnector"},
        "Mooncake": {**BOTH, "kv_connector": "MooncakeConnector", **everywhere},
    }  # fmt: skip


LIBRARIES = {"NIXL": "nixl", "Mooncake": "mooncake.engine"}


@pytest.mark.parametrize("way", ["TCP", "shared memory", "NIXL", "Mooncake"])
def test_ranks_go_on_with_what_ranks_computed_and_compute_what_one_lacks(
    way: str, ways: dict[str, dict[str, Any]]
) -> None:
    if way in LIBRARIES:
        pytest.importorskip(LIBRARIES[way], reason=f"{way} is not installed")
    config = ways[way]
    with engine(kv_transfer_config=config) as first, engine(kv_transfer_config={**config, "engine_id": None}) as second:
        told = ask(first, prompt(0, LENGTH), LENDS, 1).kv_transfer_params
        assert told is not None and told["tp_size"] == 2 == len(told["remote_ports"])
        got = ask(second, prompt(0, LENGTH), told)
        assert list(got.outputs[0].token_ids) == wanted(prompt(0, LENGTH))
        assert got.num_cached_tokens == (LENGTH - 1) // 16 * 16
        assert second._client.engine.stats().kv_connector.pages_failed == 0
        if way == "shared memory":
            return
        told = ask(first, prompt(1, LENGTH), LENDS, 1).kv_transfer_params
        assert told is not None
        closed = {**told, "remote_ports": [told["remote_ports"][0], 1]}  # nobody listens there
        got = ask(second, prompt(1, LENGTH), closed)
        assert got.num_cached_tokens == 0 and list(got.outputs[0].token_ids) == wanted(prompt(1, LENGTH))
        alone = {name: value for name, value in told.items() if name != "remote_ports"}
        second.reset_prefix_cache()
        got = ask(second, prompt(1, LENGTH), alone)
        assert got.num_cached_tokens == 0 and list(got.outputs[0].token_ids) == wanted(prompt(1, LENGTH))


def loans(llm: LLM) -> SendBuffer:
    """That wait at rank 0."""
    transfer = llm._client.engine.scheduler.kv_transfer.p2p_transfer  # type: ignore[union-attr]
    assert transfer is not None and transfer.send_buffer is not None
    return transfer.send_buffer


def gone_on(first: LLM, second: LLM, number: int) -> list[int]:
    """What the second says of a prompt whose pages the first has lent: it takes all, and they are given back."""
    ids = prompt(number, LENGTH)
    told = ask(first, ids, LENDS, 1).kv_transfer_params
    assert told is not None and len(loans(first)) == 1
    before = second._client.engine.stats().kv_connector
    got = ask(second, ids, told)
    assert got.num_cached_tokens >= (LENGTH - 1) // 16 * 16
    after = second._client.engine.stats().kv_connector
    assert after.pages_failed == 0 and after.pages_loaded > before.pages_loaded
    assert until(lambda: loans(first).num_free == loans(first).capacity)  # every reader has said that it is done
    return list(got.outputs[0].token_ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "config"),
    [
        ("llama", (1, 2), BOTH),
        pytest.param("llama", (1, 2), HERE, marks=pytest.mark.sweep),
        pytest.param("llama", (2, 4), BOTH, marks=pytest.mark.sweep),
        pytest.param("deepseek_v3", (1, 2), BOTH, marks=pytest.mark.sweep),
        pytest.param("gemma3_text", (1, 2), HERE, marks=pytest.mark.sweep),
        pytest.param("llama, int8", (1, 3), BOTH, marks=pytest.mark.sweep),
    ],
)
def test_engines_that_share_a_model_out_differently_cut_each_others_pages(
    family: str, sizes: tuple[int, int], config: dict[str, Any]
) -> None:
    settings = [{**FORMS[family][1], "tensor_parallel_size": size, "family": family} for size in sizes]
    with (
        engine(**settings[0], kv_transfer_config=config) as first,
        engine(**settings[1], kv_transfer_config={**config, "engine_id": None}) as second,
    ):
        assert gone_on(first, second, 0) == wanted(prompt(0, LENGTH), family)
        assert gone_on(second, first, 1) == wanted(prompt(1, LENGTH), family)


@pytest.mark.sweep
@pytest.mark.parametrize("way", LIBRARIES)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 4)], ids=str)
def test_libraries_fetch_rows_that_are_cut_here(
    way: str, sizes: tuple[int, int], ways: dict[str, dict[str, Any]]
) -> None:
    pytest.importorskip(LIBRARIES[way], reason=f"{way} is not installed")
    first, second = (engine(tensor_parallel_size=size, kv_transfer_config=ways[way]) for size in sizes)
    with first, second:
        assert gone_on(first, second, 0) == wanted(prompt(0, LENGTH))
        assert gone_on(second, first, 1) == wanted(prompt(1, LENGTH))


@pytest.mark.sweep
@pytest.mark.parametrize("way", LIBRARIES)
def test_libraries_move_pages_between_stages(way: str, ways: dict[str, dict[str, Any]]) -> None:
    pytest.importorskip(LIBRARIES[way], reason=f"{way} is not installed")
    settings = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "kv_transfer_config": ways[way]}
    with engine(**settings) as first, engine(**settings) as second:
        assert gone_on(first, second, 0) == wanted(prompt(0, LENGTH))


@pytest.mark.sweep
def test_ranks_of_the_cpu_and_one_process_of_jax_cut_each_others_pages() -> None:
    pytest.importorskip("jax")
    with engine() as ranks, engine(device="tpu", tensor_parallel_size=1, page_size=16) as one:
        assert gone_on(ranks, one, 0) == wanted(prompt(0, LENGTH))
        assert gone_on(one, ranks, 1) == wanted(prompt(1, LENGTH))


@pytest.mark.slow
def test_stages_give_to_their_like_and_to_nobody_else() -> None:
    settings = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    with engine(**settings) as first, engine(**settings) as second:
        assert gone_on(first, second, 0) == wanted(prompt(0, LENGTH))
        told = ask(first, prompt(1, LENGTH), LENDS, 1).kv_transfer_params
        assert told is not None and (told["tp_size"], told["pp_size"]) == (1, 2)
        for other in ({"pp_size": 1, "tp_size": 2}, {"remote_ports": told["remote_ports"][::-1]}):
            second.reset_prefix_cache()
            got = ask(second, prompt(1, LENGTH), {**told, **other})
            assert got.num_cached_tokens == 0 and list(got.outputs[0].token_ids) == wanted(prompt(1, LENGTH))


@pytest.mark.sweep
def test_ranks_of_several_machines_are_found_where_each_of_them_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine is an address of loopback here."""
    monkeypatch.setenv("QUINTET_RANKS_KEY", "of these tests alone")
    port, ids = free_port(), [*range(5, 205)]
    words = [*flags(port, 2), "--kv-transfer-config", json.dumps({**BOTH, "kv_ip": "127.0.0.2"})]
    with (
        bundled(kv_transfer_config=BOTH) as alone,
        following(*words),
        led(port, 2, kv_transfer_config={**BOTH, "kv_ip": "127.0.0.3"}) as llm,
    ):
        want = [list(ask(alone, each, None, 8).outputs[0].token_ids) for each in (ids, ids[::-1])]
        alone.reset_prefix_cache()
        for first, second, each, wanted in ((llm, alone, ids, want[0]), (alone, llm, ids[::-1], want[1])):
            told = ask(first, each, LENDS, 1).kv_transfer_params
            assert told is not None and (first is alone or told["remote_hosts"] == ["127.0.0.3", "127.0.0.2"])
            got = ask(second, each, told, 8)
            assert list(got.outputs[0].token_ids) == wanted and got.num_cached_tokens == 192
            assert until(lambda first=first: loans(first).num_free == loans(first).capacity)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "kv_ip: with nnodes, give on each machine the address"),
        ({"kv_connector": "SharedMemoryConnector", "kv_ip": "127.0.0.2"}, "is of one machine, and nnodes are several"),
    ],
)
def test_what_machines_need_is_said(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        _check_machines(KVTransferConfig(**{**BOTH, **settings}))


@pytest.mark.slow
def test_a_name_that_leaves_no_room_for_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_transfer_config.*has at most 32 characters"):
        engine(kv_transfer_config={**HERE, "engine_id": "x" * 40})
