"""Providers of each op on a GPU, best first.

The modules register when a device is opened, not before: a provider's name may mean another function on another
platform of this process.
"""

import importlib
from collections.abc import Iterable, Mapping, Sequence

from quintet.ops.linear import KINDS
from quintet.ops.registry import Op, ProviderChoice, of_kind

MODULES = (  # of `ops`
    *("attention", "expert_placement", "logits_edits", "elementwise", "moe", "norm", "quantized", "rotary", "sampling"),
    *("lora", "states", "torch_attention", "batch_invariant", "torch_linear"),
)
# Left to the specification: `linear` by plain weights and `by_heads`, which are the vendor's library here; `activate`,
# `add`, `scale`, `widen`, `scale_logits`, `layer_norm`, `take_rows` and `place_rows`, for which torch takes one pass or
# two; and `biased_attention`, with a bias written out for every pair of tokens: one family has it, with short texts.
PRIORITY: Mapping[str, Sequence[str]] = {
    "paged_attention": ("triton", "gathered"),
    "attention": ("gathered",),
    **dict.fromkeys(("write_kv", "embedding", "place_tokens", "rotary", "norm_rotary", "pair_rotary"), ("triton",)),
    "rotary_write_kv": ("triton",),
    **dict.fromkeys(("rms_norm", "add_rms_norm", "gated", "softcap"), ("triton",)),
    **dict.fromkeys(("greedy", "sample", "gumbel", "top_logprobs", "filter_logits"), ("triton",)),
    **dict.fromkeys(("penalize", "bias_tokens", "ban_tokens", "keep_tokens"), ("triton",)),
    **dict.fromkeys(("route", "route_grouped", "route_limited", "grouped_linear"), ("triton",)),
    "experts": ("vendor", "triton"),
    **dict.fromkeys(("biased_experts", "local_experts", "count_experts"), ("triton",)),
    **dict.fromkeys(("delta_rule", "selective_scan", "short_conv", "state_space", "add_lora"), ("triton",)),
    **dict.fromkeys((of_kind("linear", kind) for kind in KINDS), ("triton",)),
    **dict.fromkeys(("linear:fp8a8", "linear:w8a8"), ("vendor", "triton")),
}


# With batch_invariant, in the place of the above and alone; most of what else is bound goes row by row anyway.
INVARIANT: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("paged_attention", "linear", "by_heads", "grouped_linear", "experts"), ("invariant",)),
    **dict.fromkeys((of_kind("linear", kind) for kind in KINDS), ("invariant",)),
}

# What does not: no kernel of one tile, and reductions of torch's, which divide their work by how many rows there are.
BATCH_VARIANT = frozenset({"biased_experts", "quantized_experts"})
BATCH_VARIANT_IN_TORCH = frozenset(
    {"ungated_experts", "gated_norm", "rms_norm", "add_rms_norm", "as_large", "keep_above", "wkv7", "wkv7_out"}
) | {"add_lora", "kimi_delta_rule"}

# (op, provider) -> what it asks the host in the midst of a step, which therefore cannot be captured.
HOST_SYNCS: Mapping[tuple[str, str], str] = {
    ("paged_attention", "gathered"): "how long requests are",
    ("attention", "gathered"): "how long requests are",
    **{(op, "reference"): "how many tokens each expert has" for op in ("experts", "biased_experts", "grouped_linear")},
    ("quantized_experts", "reference"): "how many tokens each expert has",
}


def host_syncing_ops(bound: Iterable[ProviderChoice], host_syncs: Mapping[tuple[str, str], str]) -> list[str]:
    """Returns the bound ops that keep steps from being captured, and why."""
    found = [(choice, host_syncs.get((choice.op, choice.provider))) for choice in bound]
    return [f"{choice.op} by {choice.provider} asks the host {what}" for choice, what in found if what]


def register() -> None:
    """Imports the modules of `ops`, which register their providers."""
    package = __name__.rpartition(".")[0]
    for name in MODULES:
        importlib.import_module(f"{package}.ops.{name}")


PACKED_PROVIDERS = ("triton", "invariant")  # that read weights as weight_layout.py packs them


def batch_variant_ops(bound: Iterable[ProviderChoice]) -> list[str]:
    """Returns the bound ops that give other bits in another batch, where none should."""
    return [
        f"{choice.op} by {choice.provider}{''.join(f' ({name}: {why})' for name, why in choice.rejected)}"
        for choice in bound
        if (choice.op in INVARIANT and choice.provider != "invariant")
        or choice.op in BATCH_VARIANT
        or (choice.op in BATCH_VARIANT_IN_TORCH and choice.provider == "reference")
    ]


def can_pack(kind: str, priority: Mapping[str, Sequence[str]]) -> bool:
    """True if products by such weights read them as weight_layout.py packs them: if one of PACKED_PROVIDERS serves
    the op."""
    op = Op.registry[of_kind("linear", kind)]
    wanted = [each for each in priority.get(op.name, ()) if each in PACKED_PROVIDERS and each in op.providers]
    return any((probe := op.probes.get(each)) is None or probe() is None for each in wanted)


class TorchAttentionOps:
    """Ops of a layer that the bound kernels do not serve: torch alone."""

    def __init__(self) -> None:
        self.write_kv = Op.registry["write_kv"].reference
        self.paged_attention = Op.registry["paged_attention"].providers["gathered"]

    def served(self, name: str) -> bool:
        return False
