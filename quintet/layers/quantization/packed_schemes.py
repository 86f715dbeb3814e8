"""Bits of each packed module of a checkpoint: what configurations of GPTQ and its kin have in common."""

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quintet.interface.weights import StoredTensor, WeightReader
from quintet.layers.quantization.formats.awq import Awq
from quintet.layers.quantization.formats.gptq import Gptq
from quintet.layers.quantization.formats.marlin import Marlin
from quintet.layers.quantization.int32_packing import word_count
from quintet.layers.quantization.module_patterns import compile_pattern, module_aliases

BITS = range(2, 9)
CONFIG_KEY = "quantization_config"  # patterns come from
MAX_GROUP = 2**20  # inputs of a group


@dataclass(frozen=True)
class PackingScheme:
    """Packing of a module, as a configuration gives it."""

    bits: int
    group: int  # inputs; 0: all of an output's
    symmetric: bool
    act_order: bool = False  # by activations: groups are not of neighbours, if the files do not say otherwise


@dataclass(frozen=True)
class PackingRule:
    """Scheme of the modules with names that fit a pattern."""

    pattern: str
    scheme: PackingScheme | None  # None: they stayed in floats
    exact: bool = False  # it is a name
    anywhere: bool = False  # it may begin within a name

    def __post_init__(self) -> None:
        if not self.exact:
            compile_pattern(self.pattern, CONFIG_KEY)

    def fits(self, names: Iterable[str]) -> bool:
        if self.exact:
            return self.pattern in names
        known = compile_pattern(self.pattern, CONFIG_KEY)
        return any((known.search if self.anywhere else known.match)(name) for name in names)


@dataclass(frozen=True)
class PackedPlan:
    """A checkpoint's plan: the first rule that a module fits, and what the files hold of it."""

    scheme: PackingScheme
    rules: tuple[PackingRule, ...] = ()
    blocks: tuple[str, ...] = ()  # how names begin of what is packed at all, unless a rule speaks of it; (): of all
    layout: str = "gptq"  # or awq, marlin
    zeros_minus_one: bool = True  # as in Gptq
    planar: bool = False
    planar_bits: tuple[int, ...] = ()  # bits that are planar in any case
    float_modules: frozenset[str] = frozenset()  # modules with weights that the files hold in floats
    act_orders: Mapping[str, int] = field(default_factory=dict, hash=False)  # module -> Gptq.ordered, if it has one
    file_names: Mapping[str, str] = field(default_factory=dict, hash=False)  # module -> its name in the files

    def reader(self, module: str) -> WeightReader | None:
        scheme = None if module in self.float_modules else self.scheme_for(module)
        if scheme is None:
            return None
        if self.layout != "gptq":
            return Marlin(scheme.group) if self.layout == "marlin" else Awq(scheme.group)
        read = Gptq(
            scheme.bits,
            scheme.group,
            scheme.symmetric,
            self.zeros_minus_one,
            self.planar or scheme.bits in self.planar_bits,
        )
        known = self.act_orders.get(module)
        return read if known is None else replace(read, has_act_order=True, act_order_inputs=known)

    def scheme_for(self, module: str) -> PackingScheme | None:
        """Returns the scheme that the configuration has for a module; None: floats."""
        names = module_aliases(module, self.file_names.get(module))
        for rule in self.rules:
            if rule.fits(names):
                return rule.scheme
        return self.scheme if not self.blocks or any(name.startswith(self.blocks) for name in names) else None

    def has_rule_for(self, module: str) -> bool:
        """True if a rule has a scheme for this module."""
        return any(rule.scheme is not None and rule.fits([module]) for rule in self.rules)

    def with_files(self, files: Mapping[str, StoredTensor]) -> "PackedPlan":
        """With what the files say: which modules they hold in floats, and which groups are not of neighbours."""
        end = ".B" if self.layout == "marlin" else ".qweight"
        packed = {name.removesuffix(end): on.name.removesuffix(end) for name, on in files.items() if name.endswith(end)}
        plain = {name.removesuffix(".weight") for name in files if name.endswith(".weight")} - set(packed)
        named = replace(self, file_names={module: name for module, name in packed.items() if name not in ("", module)})
        ordered = packed if self.layout == "gptq" else ()
        orders = {module: known for module in ordered if (known := named._order(module, files)) is not None}
        return replace(named, float_modules=frozenset(plain if packed else ()), act_orders=orders)

    def _order(self, module: str, files: Mapping[str, StoredTensor]) -> int | None:
        """As in `orders`; None where groups are of neighbours."""
        scheme, entry = self.scheme_for(module), files.get(f"{module}.g_idx")
        if scheme is None:
            return None
        if entry is None or entry.read is None:
            return 0 if scheme.act_order else None
        if entry.shape is None or len(entry.shape) != 1 or entry.dtypes != (torch.int32,):
            return 0  # the loader says so
        rows = files[f"{module}.qweight"].shape
        if rows is None or entry.shape[0] and rows[:1] != (word_count(entry.shape[0], scheme.bits),):
            return 0
        return act_order_inputs(f"{module}.g_idx", entry.read(), scheme.group)


def act_order_inputs(name: str, groups: Tensor, size: int) -> int | None:
    """Checks g_idx -> its inputs, where as many are in each group; 0 where they are not; None where groups are of
    neighbours. ValueError for groups that do not exist."""
    inputs = len(groups)
    count = -(-inputs // (size or inputs or 1))
    if inputs and (int(groups.min()) < 0 or int(groups.max()) >= count):
        wrong = int(groups.min()) if int(groups.min()) < 0 else int(groups.max())
        raise ValueError(
            f"{name} says that an input is of group {wrong}, and {inputs} inputs make groups 0 to {count - 1}, of "
            f"{size or inputs} each; fetch the model anew"
        )
    neighbours = torch.arange(inputs) // (size or inputs or 1)
    if torch.equal(groups.long(), neighbours):
        return None
    return inputs if torch.equal(groups.long().sort().values, neighbours) else 0


def scheme_of(config: Mapping[str, Any], method: str, otherwise: PackingScheme | None = None) -> PackingScheme | None:
    """Reads a configuration, or one module's entry in it, which may have less. None: floats. ValueError for others."""
    bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    bits = otherwise.bits if bits is None and otherwise else bits
    group = (otherwise.group or -1) if group is None and otherwise else group
    if bits in (16, 32):
        return None
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in BITS:
        raise ValueError(f"the checkpoint is of {method} with {reprlib.repr(bits)} bits; quintet reads 2 to 8")
    if not isinstance(group, int) or isinstance(group, bool) or not (group == -1 or 0 < group <= MAX_GROUP):
        raise ValueError(f"{method}'s group_size {reprlib.repr(group)} is not -1 or a number of inputs")
    symmetric, ordered = config.get("sym"), config.get("desc_act")
    if otherwise is not None:
        symmetric = otherwise.symmetric if symmetric is None else symmetric
        ordered = otherwise.act_order if ordered is None else ordered
    return PackingScheme(bits, max(group, 0), symmetric is True, bool(ordered) and not config.get("static_groups"))


def flattened(names: Any) -> Iterable[Any]:
    """Returns the entries of lists in lists, however deep."""
    found, rest = [], [names]
    while rest:
        each = rest.pop()
        if isinstance(each, list | tuple):
            rest += reversed(each)
        elif each is not None:
            found.append(each)
    return found
