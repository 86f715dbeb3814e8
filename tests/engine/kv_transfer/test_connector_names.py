"""vLLM's connectors that are settings of ours."""

import json
from typing import Any

import pytest

from quintet.config import EngineConfig

GIB = 2**30
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
TCP = {"kv_connector": "TCPConnector", "kv_role": "kv_producer"}


def offloading(**extras: Any) -> dict[str, Any]:
    return {**OFFLOADING, "kv_connector_extra_config": {"cpu_bytes_to_use": 2 * GIB, **extras}}


def several(*connectors: Any, **more: Any) -> dict[str, Any]:
    extras = {"connectors": list(connectors)}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extras, **more}


@pytest.mark.parametrize("as_text", [False, True])
def test_an_offloading_connector_is_host_memory(as_text: bool) -> None:
    asked = offloading(block_size=64, eviction_policy="arc")
    config = EngineConfig.from_kwargs(kv_transfer_config=json.dumps(asked) if as_text else asked)
    assert (config.kv_offloading_size, config.kv_offloading_policy, config.kv_offloading_folder) == (2.0, "arc", None)
    assert config.kv_transfer_config.kv_connector is None
    assert config.replace(max_num_seqs=3).kv_offloading_size == 2.0


def test_its_second_tier_is_the_folder() -> None:
    tier = {"type": "fs", "root_dir": "pages", "max_bytes": 3e9}
    asked = offloading(spec_name="TieringOffloadingSpec", cpu_bytes_to_use=1e9, secondary_tiers=[tier])
    config = EngineConfig.from_kwargs(kv_transfer_config=asked)
    assert config.kv_offloading_folder == "pages" and config.kv_offloading_folder_size == 3e9 / GIB
    assert config.kv_offloading_size == 1e9 / GIB


def test_an_lmcache_connector_is_lmcache_with_the_settings_behind_its_name() -> None:
    asked = {**LMCACHE, "kv_connector_extra_config": {"lmcache.max_local_cpu_size": 2, "lmcache.local_cpu": True}}
    config = EngineConfig.from_kwargs(kv_transfer_config=several(TCP, asked))
    assert (config.kv_offloading_backend, config.kv_offloading_size) == ("lmcache", None)
    assert config.kv_offloading_lmcache == {"max_local_cpu_size": 2, "local_cpu": True} and config.stores_kv_externally
    assert config.kv_transfer_config.kv_connector == "TCPConnector"
    alone = EngineConfig.from_kwargs(kv_transfer_config=LMCACHE)
    assert alone == EngineConfig.from_kwargs(kv_offloading_backend="lmcache")


def test_several_connectors_are_each_what_they_are_alone() -> None:
    asked = several(TCP, offloading(), engine_id="first")
    config = EngineConfig.from_kwargs(kv_transfer_config=asked)
    alone = EngineConfig.from_kwargs(kv_transfer_config={**TCP, "engine_id": "first"}, kv_offloading_size=2)
    assert config == alone and config.kv_transfer_config.is_producer


@pytest.mark.parametrize(
    ("asked", "more", "says"),
    [
        (OFFLOADING, {}, r"extra_config.cpu_bytes_to_use must be given: bytes"),
        (offloading(cpu_bytes_to_use=-1), {}, "cpu_bytes_to_use must be"),
        (offloading(num_cpu_blocks=10), {}, "num_cpu_blocks is not there: .*cpu_bytes_to_use"),
        (offloading(blok_size=10), {}, "blok_size is not known of OffloadingConnector; it has cpu_bytes_to_use"),
        (offloading(eviction_policy="fifo"), {}, "eviction_policy must be one of lru, arc"),
        (offloading(spec_name="NPUOffloadingSpec"), {}, "spec_name must be CPUOffloadingSpec or Tiering"),
        (offloading(secondary_tiers=[{"type": "s3"}]), {}, "secondary_tiers must be a folder"),
        (offloading(secondary_tiers=[{"type": "fs"}]), {}, "root_dir must be given"),
        (offloading(secondary_tiers=[{}, {}]), {}, "there is one folder"),
        ({**offloading(), "kv_role": "kv_producer"}, {}, "kv_role of an OffloadingConnector is kv_both"),
        (offloading(), {"kv_offloading_size": 1}, "OffloadingConnector is kv_offloading_size, which is given as well"),
        ({**LMCACHE, "kv_role": "kv_producer"}, {}, "kv_role of an LMCacheConnectorV1 is kv_both"),
        (
            {**LMCACHE, "kv_connector_extra_config": {"lmcache_rpc_port": 1}},
            {},
            "extra_config.lmcache_rpc_port is not known of LMCacheConnectorV1; it has LMCache's settings, each behind",
        ),
        (LMCACHE, {"kv_offloading_backend": "native"}, "is kv_offloading_backend, which is given as well"),
        (
            several(LMCACHE, offloading()),
            {},
            "LMCacheConnectorV1 and OffloadingConnector: this engine's pages go to one",
        ),
        ({**LMCACHE, "kv_connector": "LMCacheMPConnector"}, {}, "unpickle what they send each other; use LMCacheConn"),
        (several(), {}, "connectors must be a list of connectors"),
        (several("TCPConnector"), {}, "kv_transfer_config must be a JSON object"),
        (several(several(TCP)), {}, "a MultiConnector within another"),
        (several(TCP, {**TCP, "kv_connector": "SharedMemoryConnector"}), {}, "TCPConnector and SharedMemoryConnector"),
        (several({**TCP, "kv_connector": "P2pNcclConnector"}), {}, "P2pNcclConnector cannot be used"),
    ],
)
def test_what_cannot_be_says_why(asked: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EngineConfig.from_kwargs(kv_transfer_config=asked, **more)
