"""Options of LoRA adapters: how many are on the device and on the host, and how large they may be."""

from dataclasses import dataclass
from typing import Any

from quintet.common.value_parsers import boolean, count, list_of, one_of, optional, text
from quintet.config.schema.fields import option


def _names(value: Any) -> tuple[str, ...]:
    found = tuple(list_of(text)([value] if isinstance(value, str) else value))
    if not found or "" in found:
        raise ValueError(f"must be names of modules such as q_proj, or all, not {value!r}")
    return found


@dataclass(frozen=True)
class LoRAOptions:
    """Adapters (LoRA) that requests may name; vLLM's names and defaults."""

    enable_lora: bool = option(
        False, boolean, "let requests name LoRA adapters (lora_request, or the adapter's name as model)", group="lora"
    )
    max_loras: int = option(1, count(), "adapters among the requests that run at once", group="lora", metavar="N")
    max_lora_rank: int = option(
        16, count(), "largest rank of an adapter: memory for max_loras of it is taken at the start", group="lora",
        metavar="RANK",
    )  # fmt: skip
    max_cpu_loras: int | None = option(
        None, optional(count()), "adapters that are kept in host memory, ready to run; max_loras if not given",
        group="lora", metavar="N",
    )  # fmt: skip
    lora_dtype: str = option(
        "auto", one_of("auto", "bfloat16", "float16", "float32"), "type of adapters on the device: the model's",
        group="lora", metavar="TYPE",
    )  # fmt: skip
    lora_target_modules: tuple[str, ...] | None = option(
        None, optional(_names), "ends of names of the modules that adapters may change (q_proj, experts, ..), or all; "
        "all but experts if not given, for their adapters take much memory", group="lora", nargs="+", metavar="NAME",
    )  # fmt: skip
    fully_sharded_loras: bool = option(
        False, boolean, "accepted: each rank keeps its share of the matrices beside its share of a product, and the "
        "small rest whole", group="lora",
    )  # fmt: skip

    def _check(self: Any) -> None:
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras={self.max_cpu_loras} is below max_loras={self.max_loras}: adapters on the device are "
                "kept on the host, too; raise it, or leave it out"
            )
