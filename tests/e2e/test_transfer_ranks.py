"""Pages between engines whose ranks are processes: each rank gives its part to its like; what one lacks all compute."""

import os
from pathlib import Path
from typing import Any

import pytest

from quintet import LLM
from quintet.outputs import RequestOutput
from tests.e2e.test_offloading import FORMS, LENGTH, of_ranks, served, tokens
from tests.e2e.test_transfer import BOTH, LENDS
from tests.e2e.test_windows import GREEDY, prompt

HERE = {"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "engine_id": f"ranks-{os.getpid()}"}


def engine(**more: Any) -> LLM:
    return of_ranks(**{"num_pages": 60, "kv_transfer_config": BOTH, **more})


def ask(llm: LLM, ids: list[int], pages: Any = None, count: int = 0) -> RequestOutput:
    params = GREEDY.clone()
    params.max_tokens, params.extra_args = count or params.max_tokens, pages and {"kv_transfer_params": pages}
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return output


def wanted(ids: list[int]) -> list[int]:
    return tokens(served(FORMS["llama"][0]), a=ids)["a"]


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
        assert got.num_cached_tokens == (LENGTH - 1) // 16 * 16 and second._client.engine.stats().pages_failed == 0
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


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, "each stage has pages of its own layers"),
        ({"kv_transfer_config": {**HERE, "engine_id": "x" * 40}}, "has at most 32 characters"),
    ],
    ids=["stages", "a long name"],
)
def test_what_ranks_cannot_do_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"kv_transfer_config.*{why}"):
        engine(**settings)
