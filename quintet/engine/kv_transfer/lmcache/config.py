"""LMCache settings that have an effect here, and the reasons why others are refused."""

import logging
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)

SUPPORTED = {
    "blocking_timeout_secs", "cache_policy", "extra_config", "lmcache_instance_id", "local_cpu",
    "local_cpu_use_hugepages", "local_disk", "local_disk_path_sharding", "lookup_timeout_ms", "max_local_cpu_size",
    "max_local_disk_size", "numa_mode", "remote_serde", "remote_storage_plugins", "remote_url",
}  # fmt: skip
# settings of vLLM users' files that change nothing here: pages move one by one, in threads, under keys of ours
IGNORED = {
    "chunk_size", "enable_async_loading", "min_retrieve_tokens", "pin_check_interval_sec", "pin_timeout_sec",
    "pre_caching_hash_algorithm", "py_enable_gc", "reserve_local_cpu_size", "save_decode_cache", "save_unfull_chunk",
    "use_gpu_connector_v3",
}  # fmt: skip
_LISTENS_REASON = "LMCache would listen for others, who need no key"
_UNUSED_REASON = "it is not driven"
_REFUSED_EXTRAS = ("audit_backend_enabled", "enable_nixl_storage")  # of extra_config
_CODE_REASON = "it names code that LMCache would load"
_REFUSED = {
    "remote_config_url": "LMCache would send all variables of this environment there",
    "run_script_api_enabled": "LMCache would run Python that anybody sends",
    "internal_api_server_enabled": _LISTENS_REASON,
    "enable_p2p": _LISTENS_REASON,
    "enable_controller": _LISTENS_REASON,
    "enable_pd": "pages go between engines by a kv_connector such as TCPConnector",
    "storage_plugins": _CODE_REASON,
    "runtime_plugin_locations": _CODE_REASON,
    "enable_blending": "pages are found behind the same beginning alone",
    "use_layerwise": "a page has all layers",
}


def check_lmcache_config(config: Any, given: Iterable[str]) -> None:
    """Raises ValueError for LMCache settings that are not supported here, or would be unsafe. given: settings beside
    those of its file and environment variables."""
    if strange := [name for name in given if not hasattr(config, name)]:
        raise ValueError(f"LMCache has no setting {strange[0]}; see its documentation")
    asked = {*getattr(config, "_user_set_keys", ()), *given}
    for name in sorted(asked - SUPPORTED - IGNORED):
        if getattr(config, name, None):
            raise ValueError(
                f"LMCache's {name} cannot be used here: {_REFUSED.get(name, _UNUSED_REASON)}; leave it out"
            )
    if idle := sorted(asked & IGNORED):
        logger.info("of LMCache's settings these change nothing here: %s", ", ".join(idle))
    if config.remote_serde not in (None, "naive"):
        raise ValueError(
            f"LMCache's remote_serde={config.remote_serde!r} cannot be used here: pages would come back changed; leave "
            "it out"
        )
    if str(config.remote_url or "").startswith("external:"):
        raise ValueError(
            f"LMCache's remote_url={config.remote_url!r} cannot be used here: {_CODE_REASON}; give another"
        )
    for name, value in (config.extra_config or {}).items():
        code = name.endswith((".module_path", ".class_name"))
        if value and (code or name in _REFUSED_EXTRAS):
            why = _CODE_REASON if code else _UNUSED_REASON
            raise ValueError(f"LMCache's extra_config {name} cannot be used here: {why}; leave it out")
