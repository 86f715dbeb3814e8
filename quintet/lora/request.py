"""LoRARequest: which adapter a request is answered with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a process that only names adapters needs no torch
    from torch import Tensor


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its name and its files, as vLLM's class of this name has them.

    `lora_int_id` is kept for callers that give one; adapters are identified by content alone. Instead of a path,
    `lora_tensors` and `peft_config` may hold what PEFT's two files would.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""  # a folder with adapter_config.json and adapter_model.safetensors
    base_model_name: str | None = None
    load_inplace: bool = False  # the files may have changed: read them again
    lora_tensors: "Mapping[str, Tensor] | None" = field(default=None, repr=False, compare=False)
    peft_config: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id


@dataclass(frozen=True)
class LoRAReference:
    """An adapter as requests carry it: its files, and the digest of what was read there. Two adapters are the same if
    their digests are: a name may be given to other files."""

    name: str
    path: str
    digest: bytes
    number: int = field(default=0, compare=False)  # lora_int_id, given or counted

    def salted(self, salt: bytes) -> bytes:
        """Returns what keeps the prefix caches of tenants and adapters apart, given a tenant's salt, which is UTF-8: no
        such text holds the byte between the two."""
        return salt + b"\xff" + self.digest
