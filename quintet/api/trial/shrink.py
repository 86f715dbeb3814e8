"""Makes a small config of a large one: the same model type and kinds of layers, with few of each and narrow."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from quintet.api.trial import entries as names
from quintet.hub.model_impl import PER_LAYER

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Entries = dict[str, Any]
MAX_LAYERS = 6  # of different kinds
MIN_LAYERS = 2
PERIODIC_LAYERS = 4  # where a period without a list of layers makes some of them different
_PERIODS = ("attn_layer_period", "expert_layer_period", "layer_group_size", "full_attention_interval")


@dataclass(frozen=True)
class _Original:
    """Sizes of the large model that others are proportional to."""

    entries: Mapping[str, Any]
    layers: int
    hidden: int
    heads: int
    head: int  # features of a head that rotate
    kept: tuple[int, ...]  # numbers of the layers that stay

    @classmethod
    def of(cls, config: "PretrainedConfig", entries: Mapping[str, Any]) -> "_Original":
        layers, hidden, heads = (
            _number(config, name, entries) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        head = entries.get("qk_rope_head_dim") or entries.get("head_dim") or hidden // max(heads, 1)
        return cls(entries, layers, hidden, heads, max(1, int(head)), _kept_layers(entries, layers))


def shrink(config: "PretrainedConfig") -> Entries:
    """Returns the entries of a small config, for the class of `config`: a text model's, not a wrapper's. ValueError if
    it names no number of layers."""
    config = copy.deepcopy(config)
    if hasattr(config, PER_LAYER):
        setattr(config, PER_LAYER, True)
    entries = config.to_dict()
    original = _Original.of(config, entries)
    small = {name: _shrunk(name, value, original) for name, value in entries.items() if name not in names.DROPPED}
    small |= {name: value for name, value in names.IF_NONE.items() if name in small and small[name] is None}
    _tie_sizes(small, original)
    return {**small, "model_type": config.model_type}


def _number(config: "PretrainedConfig", name: str, entries: Mapping[str, Any]) -> int:
    """An entry under its common name, or under one of the names in the tables."""
    value = getattr(config, name, None)
    if not _is_int(value) and name == "num_hidden_layers":
        value = next((entries[each] for each in names.LAYERS if _is_int(entries.get(each))), None)
    if isinstance(value, list) and name == "num_attention_heads" and value:
        value = max(value)
    if _is_int(value) and 0 < value <= 2**20:
        return int(value)
    if name == "num_hidden_layers":
        raise ValueError(f"config of model type {config.model_type!r} has no num_hidden_layers, or {value!r}")
    return names.HIDDEN if name == "hidden_size" else names.HEADS


def _kept_layers(entries: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Numbers of the layers that stay: the first of each kind."""
    if (period := entries.get("block_types")) and isinstance(period, list):
        return tuple(range(min(layers, len(period))))
    if (pattern := entries.get("attention_types")) and isinstance(pattern, list):  # [[["global", "local"], 12]]
        return tuple(range(min(layers, len(pattern[0][0]))))
    lists = [
        value for name, value in entries.items() if name not in names.DROPPED and _is_per_layer(name, value, layers)
    ]
    lists += [
        [repr({int(key): inner for key, inner in value.items()}.get(layer)) for layer in range(layers)]
        for name, value in entries.items()
        if name not in names.DROPPED and _is_by_layer(value)
    ]
    numbers = [set(entries[name]) for name in names.LAYER_NUMBERS if isinstance(entries.get(name), list)]
    first = [entries[name] for name in names.FIRST_LAYERS if _is_int(entries.get(name))]
    last = [layers - entries[name] for name in names.LAST_LAYERS if _is_int(entries.get(name))]
    kinds: dict[str, int] = {}
    for layer in range(layers):
        kind = [value[layer] for value in lists] + [layer in each for each in numbers]
        kinds.setdefault(repr([*kind, *(layer < bound for bound in (*first, *last))]), layer)
    kept = sorted(kinds.values())[:MAX_LAYERS]
    periodic = any(_is_int(entries.get(name)) and entries[name] > 1 for name in _PERIODS) and not lists
    wanted = min(layers, PERIODIC_LAYERS if periodic else MIN_LAYERS)
    rest = (layer for layer in range(layers) if layer not in kept)
    return tuple(sorted([*kept, *(next(rest) for _ in range(wanted - len(kept)))]))


def _is_per_layer(name: str, value: Any, layers: int) -> bool:
    listed = isinstance(value, list) and len(value) == layers and layers > 1
    return listed and name not in (*names.OTHER_LISTS, *names.LAYER_NUMBERS)


def _is_by_layer(value: Any) -> bool:
    """Returns whether an entry is a dict with layer numbers as keys."""
    return isinstance(value, dict) and bool(value) and all(str(key).isdecimal() for key in value)


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _shrunk(name: str, value: Any, original: _Original) -> Any:
    """Returns the small value of one entry; others unchanged."""
    if _is_by_layer(value):
        return _by_layer(value, original)
    if isinstance(value, dict):
        return {key: _shrunk(key, inner, original) for key, inner in value.items()} if name in names.NESTED else value
    if isinstance(value, list):
        return _shrunk_list(name, value, original)
    if not _is_int(value):
        return value
    if name in names.TOKEN_IDS or name.endswith("_token_id"):
        return names.TOKEN_IDS.get(name, 3) if value >= 0 else value
    if value < 1:
        return value
    if (count := _layer_count(name, value, original.kept, original.layers)) is not None:
        return count
    if name in names.QUERY_HEADS:
        return min(value, names.HEADS)
    if name in names.HEAD_SIZES:
        return names.HEAD_SIZES[name]
    return _key_heads(name, value, original) or min(value, names.LARGEST.get(name, value))


def _by_layer(value: Mapping[Any, Any], original: _Original) -> Entries:
    """Entries of single layers, under the new numbers of those that stay. Wider heads stay wider."""
    small: Entries = {}
    for place, layer in enumerate(original.kept):
        for inner in (inner for key, inner in value.items() if int(key) == layer):
            small[str(place)] = _shrunk_layer(inner, original)
    return small


def _shrunk_layer(inner: Any, original: _Original) -> Any:
    if not isinstance(inner, dict):
        return inner
    small = {name: _shrunk(name, value, original) for name, value in inner.items()}
    if "num_attention_heads" in inner and inner.get("num_key_value_heads") == inner["num_attention_heads"]:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if _is_int(inner.get("head_dim")):
        small["head_dim"] = max(2, inner["head_dim"] * names.HEAD // original.head // 2 * 2)
    return small


def _layer_count(name: str, value: int, kept: Sequence[int], layers: int) -> int | None:
    """Counts of layers and the last layer of a kind, among those that stay; None for other entries."""
    if name in names.LAYERS:
        return len(kept)
    if name in names.FIRST_LAYERS:
        return sum(layer < value for layer in kept)
    if name in names.LAST_LAYERS:
        return sum(layer >= layers - value for layer in kept)
    return len(kept) - 1 if name == "moe_layer_end_index" else None


def _key_heads(name: str, value: int, original: _Original) -> int:
    """As many as query heads, one, or a part of them, as in the large model; 0 for other entries."""
    if name not in names.KEY_HEADS:
        return 0
    if value == 1:
        return 1
    queries = original.entries.get(names.KEY_HEADS[name], original.heads)
    queries = max(queries) if isinstance(queries, list) else queries
    return names.HEADS if value == queries else min(value, names.KV_HEADS)


def _shrunk_list(name: str, value: list[Any], original: _Original) -> list[Any]:
    if name in names.LAYER_NUMBERS:
        return [place for place, layer in enumerate(original.kept) if layer in value]
    if name == "mrope_section":
        return _sections(value, original)
    if name in ("long_factor", "short_factor"):
        return value[: max(1, len(value) * names.HEAD // original.head)]
    if name in names.TOKEN_IDS:
        return [names.TOKEN_IDS[name]]
    if name == "attention_types":
        return [[value[0][0], 1]]
    if _is_per_layer(name, value, original.layers):
        value = [value[layer] for layer in original.kept]
    return [_shrunk(name, each, original) if _is_int(each) else each for each in value]


def _sections(sections: Sequence[int], original: _Original) -> list[int]:
    """Parts of the rotated pairs, in the same proportion."""
    pairs = max(len(sections), sum(sections) * names.HEAD // original.head)
    small = [max(1, section * pairs // sum(sections)) for section in sections]
    return [small[0] + pairs - sum(small), *small[1:]]


def _tie_sizes(small: Entries, original: _Original) -> None:
    """Sets sizes that depend on others, in place."""
    old = original.entries
    groups = small.get("topk_group")
    if _is_int(groups) and groups > 0:
        count = old.get("n_group", old.get("num_expert_group"))
        small["topk_group"] = 2 if groups == count and groups > 1 else 1
    if _is_int(old.get("qk_rope_head_dim")):
        _tie_latent(small, old)
    elif _is_int(old.get("v_head_dim")) and old["v_head_dim"] != old.get("head_dim"):
        small["v_head_dim"] = names.HEAD // 2
    if _is_int(old.get("rotary_dim")):
        small["rotary_dim"] = max(2, old["rotary_dim"] * names.HEAD // original.head // 2 * 2)
    if _is_int(old.get("attention_hidden_size")):
        small["attention_hidden_size"] = max(1, old["attention_hidden_size"] // original.hidden) * names.HIDDEN
    _tie_positions(small, old)
    _tie_mamba(small, old, original.hidden)


def _tie_latent(small: Entries, old: Mapping[str, Any]) -> None:
    """Heads of latent attention: a part that rotates and a part that does not."""
    if not _is_int(old.get("qk_nope_head_dim")):  # the rotated part is in head_dim
        small["qk_rope_head_dim"] = names.HEAD // 2
    elif old.get("head_dim") == old["qk_nope_head_dim"] + old["qk_rope_head_dim"]:
        small["head_dim"] = 2 * names.HEAD


def _tie_positions(small: Entries, old: Mapping[str, Any]) -> None:
    longest = old.get("max_position_embeddings")
    ropes = [
        each for each in (small, small.get("rope_parameters"), small.get("rope_scaling")) if isinstance(each, dict)
    ]
    for rope in ropes:
        trained = rope.get("original_max_position_embeddings")
        if isinstance(trained, (int, float)) and isinstance(longest, (int, float)) and longest > 0:
            part = min(1.0, trained / longest)
            rope["original_max_position_embeddings"] = max(names.POSITIONS // 8, math.ceil(names.POSITIONS * part))


def _tie_mamba(small: Entries, old: Mapping[str, Any], hidden: int) -> None:
    expand = old.get("mamba_expand", old.get("expand"))
    inner = int(names.HIDDEN * expand) if isinstance(expand, (int, float)) and expand > 0 else 2 * names.HIDDEN
    heads = [name for name in names.MAMBA_HEADS if _is_int(old.get(name))]
    if "state_size" in old and "num_heads" in old and "head_dim" in old:  # Mamba 2
        heads.append("num_heads")
    for name in heads:
        small[name] = inner // names.HEAD
    for name in names.MAMBA_HEAD_SIZES:
        if _is_int(old.get(name)):
            small[name] = names.HEAD
    if _is_int(old.get("mamba_d_ssm")):
        small["mamba_d_ssm"] = inner
    if "state_size" in old and _is_int(old.get("intermediate_size")) and old["intermediate_size"] == expand * hidden:
        small["intermediate_size"] = inner
