"""ModelRegistry: vLLM's name for the families that there are, by the classes that config.json names."""

import importlib
from collections.abc import Iterator
from typing import Any

from quintet.layers.decoder import CausalLM
from quintet.models import added, built_in_class, families, register


class _Registry:
    """Registry of the architectures that run."""

    def register_model(self, model_arch: str, model_cls: str | type) -> None:
        """Adds the model of an architecture: a class like those in quintet/models, or "package.module:Class".

        vLLM's own model classes are built of its layers and do not run here.
        """
        if not isinstance(model_arch, str) or not model_arch:
            raise ValueError(f"model_arch is an architecture's name, as config.json has it, not {model_arch!r}")
        if not isinstance(model_cls, type) and not (isinstance(model_cls, str) and ":" in model_cls):
            raise ValueError(f"model_cls is a class or 'package.module:Class', not {model_cls!r}")
        register(model_arch, model_cls)

    def get_supported_archs(self) -> list[str]:
        """All of them, sorted: of the families built in, and what was added."""
        return sorted({*self._built_in(), *(name for name in added())})

    def _built_in(self) -> Iterator[str]:
        """Yields the class names, from transformers, of the built-in families that generate."""
        names: Any = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        for kind in families():
            if kind in names and kind not in added() and issubclass(built_in_class(kind), CausalLM):
                yield names[kind]


ModelRegistry = _Registry()
