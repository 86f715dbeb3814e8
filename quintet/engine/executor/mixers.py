"""Facts about mixers that a worker settles once."""

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from quintet.interface.platform import Mixer
from quintet.interface.types import AttentionSpec, BlockChoiceSpec, LayerSpec, StateSpec, TokenChoiceSpec
from quintet.layers.layer_state import LayerMixer
from quintet.ops.compressed.attention import CompressedAttentionMixer, EntryChoice
from quintet.ops.sparse.blocks import BlockChoice
from quintet.ops.sparse.tokens import TokenChoice
from quintet.ops.states import DRAFT_OPS, MAX_DRAFTS, StateMixer

if TYPE_CHECKING:
    from quintet.engine.executor.worker import Worker

COMPRESSING = frozenset({"pool_windows", "recent_rows"})  # ops of states that layers with compressed entries keep


def mixer_of(worker: "Worker", spec: LayerSpec, family: str) -> Mixer:
    """Returns the mixer of a layer: the platform's, or an indexer of the bound ops. ValueError where a layer has what
    the platform does not know of."""
    platform, supported = worker.platform, worker.platform.optional_spec_fields
    if compresses(spec):
        return _compressing_mixer(worker, spec, family)
    if isinstance(spec, TokenChoiceSpec):
        if "chosen" in supported:
            return TokenChoice(spec, worker.ops)
        raise ValueError(
            f"platform {platform.name} has no attention to chosen tokens ('chosen' is not in optional_spec_fields), "
            f"and in requests of more than {spec.count} tokens {family} sees those that an indexer chooses; set "
            f"max_model_len to {spec.count} or less, or use device='cpu'"
        )
    if isinstance(spec, BlockChoiceSpec):
        if "chosen_blocks" in supported:
            return BlockChoice(spec, worker.ops)
        most = spec.count * spec.block
        raise ValueError(
            f"platform {platform.name} has no attention to chosen blocks ('chosen_blocks' is not in "
            f"optional_spec_fields), and in requests of more than {most} tokens {family} sees {spec.count} blocks of "
            f"{spec.block} that an indexer chooses; set max_model_len to {most} or less, or use device='cpu'"
        )
    if isinstance(spec, StateSpec) and not platform.supports_states:
        raise ValueError(
            f"platform {platform.name} keeps pages alone (supports_states is False), and layers of {family} keep a "
            f"state per request ({spec.op}); run this model on another platform"
        )
    if isinstance(spec, AttentionSpec) and spec.source == "cross" and "cross" not in supported:
        raise ValueError(
            f"platform {platform.name} has no attention to an encoder's rows ('cross' is not in optional_spec_fields), "
            f"and layers of {family} read them; run this model on another platform, such as device='cpu'"
        )
    if isinstance(spec, AttentionSpec) and spec.chunk is not None and "chunk" not in supported:
        raise ValueError(
            f"platform {platform.name} has no attention within chunks, and layers of {family} see chunks of "
            f"{spec.chunk} tokens; run this model on another platform"
        )
    if isinstance(spec, AttentionSpec) and spec.distances and "distances" not in supported:
        raise ValueError(
            f"platform {platform.name} adds no numbers of distances to scores, and layers of {family} have them "
            "('distances' is not in optional_spec_fields); use device='cpu'"
        )
    return platform.mixer(spec, worker.ops, worker.rank_info.rank)


def compresses(spec: LayerSpec) -> bool:
    """Returns whether the layer has, or makes, compressed entries of tokens."""
    if isinstance(spec, StateSpec):
        return spec.op in COMPRESSING
    if isinstance(spec, AttentionSpec):
        return spec.rate is not None
    return isinstance(spec, TokenChoiceSpec) and spec.rate > 0


def _compressing_mixer(worker: "Worker", spec: LayerSpec, family: str) -> Mixer:
    platform = worker.platform
    if "compressed" not in platform.optional_spec_fields:
        raise ValueError(
            f"platform {platform.name} has no attention to compressed entries ('compressed' is not in "
            f"optional_spec_fields), and layers of {family} read them; run this model with device='cpu'"
        )
    if isinstance(spec, StateSpec):
        return StateMixer(spec, worker.ops)
    if isinstance(spec, AttentionSpec):
        return CompressedAttentionMixer(spec, worker.ops)
    assert isinstance(spec, TokenChoiceSpec), "compresses() knows no other"
    return EntryChoice(spec, worker.ops)


def kv_heads(mixings: Collection[LayerMixer], count: int) -> tuple[int | None, ...]:
    """Returns the KV heads of each of the first `count` tensors of the state; None: layers have none, or differ."""
    owners: list[set[int | None]] = [set() for _ in range(count)]
    for mixing in mixings:
        for place in mixing.tensor_indices:
            if place < count:
                owners[place].add(mixing.kv_heads)
    return tuple(each.pop() if len(each) == 1 else None for each in owners)


def keep_drafts_apart(worker: "Worker", most: int) -> int:
    """Lets the states of a worker's model keep apart what drafts do to them, if those of all layers can -> drafts of a
    request in a step; 0: tokens that a refused draft follows are computed again."""
    states = [(mixer, mixer.spec) for mixer in worker.main.mixers if isinstance(mixer.spec, StateSpec)]
    ops = {spec.op for _, spec in states}
    if not (most and ops) or not ops <= DRAFT_OPS or "max_drafts" not in worker.platform.optional_spec_fields:
        return 0
    most = min(most, MAX_DRAFTS)
    for mixer, spec in states:
        mixer.mixer = worker.platform.mixer(replace(spec, max_drafts=most), worker.ops, worker.rank_info.rank)
    return most
