"""Expert parallelism: decides if the ranks of an engine hold whole experts, and describes it."""

from torch import nn

from quintet.config import EngineConfig
from quintet.interface.platform import Capabilities
from quintet.layers.moe.expert_placement import ExpertPlacement, format_expert_ids
from quintet.layers.moe.moe import Experts


def expert_placement_of(config: EngineConfig, facts: Capabilities) -> ExpertPlacement | None:
    """Returns the expert placement; None: each expert is cut, or there is one rank. ValueError where the settings
    cannot be."""
    if not config.enable_expert_parallel:
        return None
    if facts.spmd and config.tensor_parallel_size > 1:
        raise ValueError(
            "enable_expert_parallel: one process drives all devices here, and its compiler cuts every expert; leave "
            "it out"
        )
    if config.tensor_parallel_size == 1:
        if config.enable_eplb:
            raise ValueError(
                "enable_eplb moves experts between ranks, and there is one; give tensor_parallel_size, or leave it out"
            )
        return None
    copies = config.eplb_config.num_redundant_experts
    return ExpertPlacement(config.expert_placement_strategy, copies, config.enable_eplb)


def moe_layers_of(model: nn.Module) -> list[tuple[str, Experts]]:
    """Returns the layers of a rank that have whole experts, shared out over the ranks: by their paths, in order."""
    return [(path, each) for path, each in model.named_modules() if isinstance(each, Experts) and each.rank_experts]


def describe_experts(config: EngineConfig, model: nn.Module) -> list[str]:
    """Returns the effect of enable_expert_parallel, in words. ValueError where the model has no experts."""
    if not config.enable_expert_parallel:
        return []
    if not any(isinstance(each, Experts) for each in model.modules()):
        raise ValueError(f"enable_expert_parallel: {config.model} has no experts; leave it out")
    found = moe_layers_of(model)
    if not found:
        return ["enable_expert_parallel: nothing changes, for one rank has all experts (tensor_parallel_size=1)"]
    lines = {
        (dealt.experts, "; ".join(f"rank {rank}: {format_expert_ids(own)}" for rank, own in enumerate(dealt.placement)))
        for dealt in (each.rank_experts for _, each in found)
        if dealt is not None
    }
    how = config.expert_placement_strategy + (", moved by load" if config.enable_eplb else "")
    reasons = [f"{count} experts of a layer, whole on their ranks ({how}): {where}" for count, where in sorted(lines)]
    engines = f"; each of {config.data_parallel_size} engines has all experts" if config.data_parallel_size > 1 else ""
    return [
        *reasons,
        f"all2all_backend={config.all2all_backend}: every rank has all tokens, so that none travels, and one sum ends "
        f"a layer{engines}",
    ]
