"""The checks of `batch_invariant`: what the settings and the bound ops must be."""

from collections.abc import Iterable

from quintet.config import EngineConfig
from quintet.ops.registry import ProviderChoice
from quintet.platforms.gpu import providers


def describe(config: EngineConfig) -> list[str]:
    """Describes a mode that few need; ValueError where another setting takes it back."""
    if not config.batch_invariant:
        return []
    if config.attention_backend != "auto":
        raise ValueError(
            f"batch_invariant=True has an attention of its own, and attention_backend={config.attention_backend!r} was "
            "asked for; give one of them"
        )
    return ["batch_invariant: one tile for all sizes, no splits, sums in rank order: slower, by how much is unmeasured"]


def check(config: EngineConfig, recordable: bool, bound: Iterable[ProviderChoice]) -> None:
    """ValueError where the model, or something that was bound, gives other bits in another batch."""
    if config.batch_invariant and not recordable:
        raise ValueError("batch_invariant=True: torch computes parts of this model as it likes; leave it out")
    if config.batch_invariant and (found := providers.batch_variant_ops(bound)):
        raise ValueError(f"batch_invariant=True is not kept by {', '.join(found)}; leave it out")
