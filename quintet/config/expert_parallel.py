"""Expert parallelism (EP): whether ranks keep whole experts, which ones, and whether these move by load (EPLB)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from quintet.common.value_parsers import boolean, count
from quintet.config.schema.fields import Nested, choice_field, nested, option

_ALL2ALL_BACKENDS = frozenset(  # vLLM's ways to bring tokens to the experts of other ranks
    {"pplx", "deepep_high_throughput", "deepep_low_latency", "mori", "nixl_ep", "flashinfer_all2allv"}
    | {"flashinfer_nvlink_two_sided", "flashinfer_nvlink_one_sided"}
)


def _all2all(value: Any) -> str:
    if value in _ALL2ALL_BACKENDS:
        raise ValueError(
            f"{value!r} is not there: it sends the tokens of a rank to the experts of another, by a library for GPUs; "
            "here every rank has all tokens, and none is sent; leave it out"
        )
    if value not in ("allgather_reducescatter", "naive"):
        raise ValueError(f"must be allgather_reducescatter or naive, not {value!r}")
    return str(value)


@dataclass(frozen=True)
class EPLBConfig(Nested):
    """Placement of experts by their load (EPLB); vLLM's names."""

    name: ClassVar[str] = "eplb_config"

    window_size: int = option(
        1000, count(), "steps whose load settles where experts go", group="device", metavar="STEPS"
    )
    step_interval: int = option(3000, count(), "steps from one placement to the next", group="device", metavar="STEPS")
    num_redundant_experts: int = option(
        0, count(0), "copies of experts that are kept beside one of each, of those with the most to do", group="device",
        metavar="N",
    )  # fmt: skip
    log_balancedness: bool = option(
        False,
        boolean,
        "log how even the load of the ranks was whenever experts are placed: mean over most",
        group="device",
    )


@dataclass(frozen=True)
class ExpertOptions:
    """Experts and the ranks of an engine."""

    enable_expert_parallel: bool = option(
        False, boolean, "each rank keeps whole experts, instead of a share of each", group="device", flags=("-ep",),
    )  # fmt: skip
    expert_placement_strategy: str = choice_field(
        "linear", "linear", "round_robin", help="which experts a rank has, with enable_expert_parallel: neighbours, or "
        "every so many-th", group="device",
    )  # fmt: skip
    all2all_backend: str = option(
        "allgather_reducescatter", _all2all, "how tokens come to experts: allgather_reducescatter (naive is the same) "
        "says what is so: all ranks have all tokens, and one sum ends a layer", group="device", metavar="NAME",
    )  # fmt: skip
    enable_eplb: bool = option(
        False,
        boolean,
        "with enable_expert_parallel, move experts between ranks by what they had to do",
        group="device",
    )
    eplb_config: EPLBConfig = nested(
        EPLBConfig, EPLBConfig(), 'how, such as {"step_interval": 1000, "num_redundant_experts": 2}', group="device",
    )  # fmt: skip

    enable_return_routed_experts: bool = option(
        False,
        boolean,
        "return the experts of each token (CompletionOutput.routed_experts), for trainers that replay them",
        group="device",
    )

    def _check(self: Any) -> None:
        if self.enable_return_routed_experts and self.pipeline_parallel_size > 1:
            raise ValueError(
                "enable_return_routed_experts: each pipeline stage knows the experts of its own layers alone; leave it "
                "out, or set pipeline_parallel_size=1"
            )
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ValueError(
                "enable_eplb moves whole experts between ranks, and enable_expert_parallel is off: every rank has a "
                "share of each; give both, or neither"
            )
        if self.enable_eplb and self.pipeline_parallel_size > 1:
            raise ValueError(
                "enable_eplb: all ranks have to count the same loads, and those of other stages see other layers; "
                "leave it out, or set pipeline_parallel_size=1"
            )
        if self.eplb_config.num_redundant_experts and not self.enable_eplb:
            raise ValueError(
                f"eplb_config.num_redundant_experts={self.eplb_config.num_redundant_experts}: copies are kept for "
                "enable_eplb, which is off; turn it on, or leave them out"
            )
