"""Loads logits processors: classes, dotted names and entry points, of quintet's interface or vLLM's."""

import importlib
import importlib.metadata
from collections.abc import Iterable

from quintet.common.suggestions import unknown_name_error
from quintet.engine.sampling.logits_processors import LogitsProcessor
from quintet.engine.sampling.vllm_compat import adapt_processor

ENTRY_POINT_GROUP = "quintet.logits_processors"  # entry points


def load_processors(specs: Iterable[str | type[LogitsProcessor]]) -> list[type[LogitsProcessor]]:
    """Classes from classes, dotted names "package.module:Class", or names of entry points in ENTRY_POINT_GROUP. Those
    that have vLLM's methods are adapted."""
    return [_check_class(_load(spec), spec) for spec in specs]


def _load(spec: str | type[LogitsProcessor]) -> object:
    if not isinstance(spec, str):
        return spec
    if ":" not in spec:
        points = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
        if spec not in points:
            raise ValueError(
                f"{unknown_name_error('logits processor', spec, points)}; a class is written package.module:Class"
            )
        return points[spec].load()
    module, _, name = spec.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"logits processor {spec!r} cannot be loaded: {error}") from error
    return found


def _check_class(found: object, spec: object) -> type[LogitsProcessor]:
    theirs = isinstance(found, type) and hasattr(found, "update_state")
    if not isinstance(found, type) or not (theirs or issubclass(found, LogitsProcessor)):
        raise ValueError(
            f"logits processor {spec!r} is neither a subclass of quintet.LogitsProcessor nor has vLLM's methods"
        )
    missing = set(getattr(found, "__abstractmethods__", ()))
    missing |= {name for name in ("apply", "is_argmax_invariant") if not hasattr(found, name)}
    if missing:
        raise ValueError(f"logits processor {spec!r} does not define {', '.join(sorted(missing))}")
    return adapt_processor(found) if theirs else found
