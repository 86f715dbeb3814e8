"""Loads proposers of other packages: entry points, or classes by their names."""

from importlib import import_module

from quintet.common.plugins import entry_points
from quintet.common.suggestions import unknown_name_error
from quintet.config import SpeculativeConfig
from quintet.engine.spec_decode.proposer import Proposer

ENTRY_POINT_GROUP = "quintet.proposers"  # entry points
_FIELD = "speculative_config.model"


def load_proposer(config: SpeculativeConfig, vocab_size: int) -> Proposer:
    """Returns an instance of the class that `model` names, made as Class(config, vocab_size). ValueError if it cannot
    be loaded, or is no subclass of Proposer."""
    spec = config.model or ""
    found = _load(spec)
    if not isinstance(found, type) or Proposer not in found.__mro__:
        raise ValueError(
            f"{_FIELD} {spec!r} is no subclass of {Proposer.__module__}.Proposer; proposers of vLLM have another "
            "interface"
        )
    if missing := getattr(found, "__abstractmethods__", ()):
        raise ValueError(f"{_FIELD} {spec!r} does not define {', '.join(sorted(missing))}")
    try:
        proposer: Proposer = found(config, vocab_size)
    except Exception as error:
        raise ValueError(f"{_FIELD} {spec!r} cannot be made: {type(error).__name__}: {error}") from error
    num_drafts, most = getattr(proposer, "num_drafts", None), config.num_speculative_tokens
    if type(num_drafts) is not int or not 1 <= num_drafts <= most:
        raise ValueError(f"{_FIELD} {spec!r}: num_drafts must be 1 to num_speculative_tokens={most}, not {num_drafts}")
    return proposer


def _load(spec: str) -> object:
    module, _, name = spec.partition(":") if ":" in spec else spec.rpartition(".")
    if not module:
        points = {point.name: point for point in entry_points(ENTRY_POINT_GROUP)}
        if spec not in points:
            raise ValueError(
                f"{_FIELD}: {unknown_name_error('proposer', spec, points)}; a class is written package.module:Class"
            )
        return points[spec].load()
    try:
        found: object = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{_FIELD} {spec!r} cannot be loaded: {error}") from error
    return found
