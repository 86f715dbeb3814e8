"""vLLM's connectors that are settings of ours: those that keep an engine's own pages, and several at once."""

from collections.abc import Mapping
from typing import Any

from quintet.common.value_parsers import count, json_object, one_of, text
from quintet.config.kv_transfer import KVTransferConfig
from quintet.config.schema.fields import NestedError

FIELD, EXTRAS = "kv_transfer_config", "kv_connector_extra_config"
OFFLOADING, LMCACHE, MULTI = "OffloadingConnector", "LMCacheConnectorV1", "MultiConnector"
_CPU, _TIERING = "CPUOffloadingSpec", "TieringOffloadingSpec"
_POLICIES = ("lru", "arc")
_LMCACHE_PREFIX = "lmcache."  # before LMCache's own names
_ENGINE_FIELDS = ("engine_id", "kv_load_failure_policy")  # entries beside the list that go for each in it


def split_connectors(named: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name; those connectors in kv_transfer_config become kv_offloading_size and its neighbours."""
    asked = named.get(FIELD)
    if asked is None or isinstance(asked, KVTransferConfig):
        return dict(named)
    entries = KVTransferConfig.entries(asked)
    if entries.get("kv_connector") not in (OFFLOADING, LMCACHE, MULTI):
        return dict(named)
    found, others, ours = dict(named), list[dict[str, Any]](), list[str]()
    del found[FIELD]
    for each in _multi_entries(entries) if entries["kv_connector"] == MULTI else [entries]:
        connector = each.get("kv_connector")
        if connector not in (OFFLOADING, LMCACHE):
            others.append(each)
            continue
        ours.append(connector)
        for name, value in (_offloading(each) if connector == OFFLOADING else _lmcache(each)).items():
            if found.get(name) is not None:
                raise NestedError(f"{FIELD}: {connector} is {name}, which is given as well; leave one of them out")
            found[name] = value
    if len(ours) > 1:
        raise NestedError(f"{FIELD}: {' and '.join(ours)}: this engine's pages go to one place; leave one of them out")
    if len(others) > 1:
        names = " and ".join(str(each.get("kv_connector")) for each in others)
        raise NestedError(f"{FIELD}: {names}: pages of other engines come by one way; leave one of them out")
    return {**found, FIELD: others[0]} if others else found


def _multi_entries(entries: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the entries of each connector in a MultiConnector."""
    where, extras = f"{FIELD}.{EXTRAS}", _extras(entries, ("connectors",))
    listed = extras.get("connectors")
    if not isinstance(listed, list) or not listed:
        raise NestedError(f"{where}.connectors must be a list of connectors, each as {FIELD} is given for it alone")
    own = {name: entries[name] for name in _ENGINE_FIELDS if entries.get(name) is not None}
    found = [{**own, **KVTransferConfig.entries(each)} for each in listed]
    if any(each.get("kv_connector") == MULTI for each in found):
        raise NestedError(f"{where}.connectors: a {MULTI} within another; give what it has instead of it")
    return found


def _lmcache(entries: Mapping[str, Any]) -> dict[str, Any]:
    """An LMCacheConnectorV1 by our names."""
    if entries.get("kv_role") not in (None, "kv_both"):
        raise NestedError(f"{FIELD}.kv_role of an {LMCACHE} is kv_both: it keeps pages, and has them come back")
    try:
        extras = json_object(entries.get(EXTRAS) or {})
    except ValueError as error:
        raise NestedError(f"{FIELD}.{EXTRAS} {error}") from None
    if strange := sorted(name for name in extras if not name.startswith(_LMCACHE_PREFIX)):
        raise _entry_error(
            strange[0], f"is not known of {LMCACHE}; it has LMCache's settings, each behind {_LMCACHE_PREFIX!r}"
        )
    asked = {name.removeprefix(_LMCACHE_PREFIX): value for name, value in extras.items()}
    return {"kv_offloading_backend": "lmcache"} | ({"kv_offloading_lmcache": asked} if asked else {})


def _offloading(entries: Mapping[str, Any]) -> dict[str, Any]:
    """An OffloadingConnector by our names."""
    if entries.get("kv_role") not in (None, "kv_both"):
        raise NestedError(f"{FIELD}.kv_role of an {OFFLOADING} is kv_both: it keeps pages, and has them come back")
    extras = _extras(
        entries, ("cpu_bytes_to_use", "block_size", "eviction_policy", "spec_name", "secondary_tiers", "num_cpu_blocks")
    )
    if "num_cpu_blocks" in extras:
        raise _entry_error("num_cpu_blocks", "is not there: what pages may take is given in bytes (cpu_bytes_to_use)")
    if "cpu_bytes_to_use" not in extras:
        raise _entry_error("cpu_bytes_to_use", "must be given: bytes of host memory for pages")
    found: dict[str, Any] = {"kv_offloading_size": _value(extras, "cpu_bytes_to_use", _int_value) / 2**30}
    if "block_size" in extras:
        _value(extras, "block_size", count())  # pages are moved one by one, however large a block
    if "eviction_policy" in extras:
        found["kv_offloading_policy"] = _value(extras, "eviction_policy", one_of(*_POLICIES))
    spec, tiers = extras.get("spec_name", _CPU), extras.get("secondary_tiers") or []
    if spec not in (_CPU, _TIERING):
        raise _entry_error("spec_name", f"must be {_CPU} or {_TIERING}, not {spec!r}")
    if not isinstance(tiers, list) or len(tiers) > 1:
        raise _entry_error("secondary_tiers", "must be a list of one: there is one folder behind host memory")
    return found | (_folder(tiers[0]) if tiers else {})


def _folder(tier: Any) -> dict[str, Any]:
    known = ("type", "root_dir", "max_bytes")
    if not isinstance(tier, dict) or tier.get("type") not in ("fs", "fs_python") or set(tier) - set(known):
        raise _entry_error(
            "secondary_tiers", f'must be a folder, such as {{"type": "fs", "root_dir": "pages"}}, not {tier!r}'
        )
    found = {"kv_offloading_folder": _value(tier, "root_dir", text)}
    if "max_bytes" in tier:
        found["kv_offloading_folder_size"] = _value(tier, "max_bytes", _int_value) / 2**30
    return found


def _extras(entries: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    try:
        found = json_object(entries.get(EXTRAS) or {})
    except ValueError as error:
        raise NestedError(f"{FIELD}.{EXTRAS} {error}") from None
    if strange := sorted(set(found) - set(known)):
        raise NestedError(
            f"{FIELD}.{EXTRAS}.{strange[0]} is not known of {entries['kv_connector']}; it has {', '.join(known)}"
        )
    return dict(found)


def _int_value(value: Any) -> int:
    """vLLM gives 1e9."""
    return int(count()(int(value) if isinstance(value, float) and value.is_integer() else value))


def _value(entries: Mapping[str, Any], name: str, check: Any) -> Any:
    try:
        return check(entries[name])
    except KeyError:
        raise _entry_error(name, "must be given") from None
    except ValueError as error:
        raise _entry_error(name, str(error)) from None


def _entry_error(name: str, why: str) -> NestedError:
    return NestedError(f"{FIELD}.{EXTRAS}.{name} {why}")
