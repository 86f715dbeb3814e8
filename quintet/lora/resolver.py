"""LoRA resolvers: find an adapter that a request names and the server does not have yet.

vLLM's interface, by the same name. A package names its resolvers in the entry-point group `quintet.lora_resolvers`:
each is a LoRAResolver, or a class that makes one without arguments. They are asked only where adapters may be loaded at
run time, after the two that are built in: a folder, and named repositories of the hub.
"""

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path

from quintet.common.plugins import entry_points
from quintet.lora.request import LoRARequest

GROUP = "quintet.lora_resolvers"
_CONFIG = "adapter_config.json"
_MAX_BYTES = 2**20  # of that file

logger = logging.getLogger(__name__)


class LoRAResolver(ABC):
    """Finds adapters by name. It is asked in the event loop: what takes long belongs into a thread."""

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Returns the adapter of that name for the model, whose path or hub id is `base_model_name`; None if there is
        none. `lora_name` is what a caller sent: not to be trusted."""


class FolderResolver(LoRAResolver):
    """Adapters of one folder: each is a folder in it, by its name, that was trained for the model that is served."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        return await asyncio.to_thread(self._find, base_model_name, lora_name)

    def _find(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if not lora_name.isprintable() or lora_name in ("", ".", "..") or "/" in lora_name or "\\" in lora_name:
            return None  # a path, which might leave the folder
        folder = self._folder / lora_name
        try:
            with (folder / _CONFIG).open("rb") as file:
                entries = json.loads(file.read(_MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        trained_for = str(entries.get("base_model_name_or_path")) if isinstance(entries, dict) else ""
        if _last_part(trained_for) != _last_part(base_model_name):
            logger.warning(
                "the adapter %r of --lora-cache-dir was trained for %r, and not for %r; load it with "
                "/v1/load_lora_adapter if it fits", lora_name, trained_for[:200], base_model_name,
            )  # fmt: skip
            return None
        return LoRARequest(lora_name, 0, str(folder))


class HubResolver(LoRAResolver):
    """Adapters of the Hugging Face hub, of those repositories alone that the operator names."""

    def __init__(self, repositories: Collection[str]) -> None:
        self._repositories = frozenset(repositories)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        return LoRARequest(lora_name, 0, lora_name) if lora_name in self._repositories else None


def make_resolvers(folder: str | None, repositories: Collection[str]) -> list[LoRAResolver]:
    """Returns the resolvers to ask, in order. ValueError names an installed one that cannot be used."""
    made: list[LoRAResolver] = [] if folder is None else [FolderResolver(Path(folder).expanduser().absolute())]
    if repositories:
        made.append(HubResolver(repositories))
    for point in sorted(entry_points(GROUP), key=lambda each: each.name):
        try:
            resolver = point.load()
            resolver = resolver() if isinstance(resolver, type) else resolver
        except Exception as error:  # a package's own code
            raise ValueError(
                f"the LoRA resolver {point.name!r} ({point.value}) failed: {type(error).__name__}: {error}; mend the "
                "package that brings it, or uninstall it"
            ) from error
        if not callable(getattr(resolver, "resolve_lora", None)):
            raise ValueError(
                f"the LoRA resolver {point.name!r} ({point.value}) has no resolve_lora, as LoRAResolver has"
            )
        made.append(resolver)
    return made


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].lower()
