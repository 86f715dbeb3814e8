"""Rows of encoders of media that engines share: where they lie, and who writes and reads them."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from quintet.common.value_parsers import count, json_object, one_of, optional, text
from quintet.config.schema.fields import Nested, option

_PRODUCER, _CONSUMER, _BOTH = "ec_producer", "ec_consumer", "ec_both"
_CONNECTORS = ("ECExampleConnector",)


def _folder(value: Any) -> str:
    return os.path.abspath(os.path.expanduser(text(value))) if value else ""


@dataclass(frozen=True)
class ECTransferExtras(Nested):
    """ec_connector_extra_config."""

    name: ClassVar[str] = "ec_transfer_config.ec_connector_extra_config"

    shared_storage_path: str = option("", _folder, "folder that all engines see", group="memory", metavar="FOLDER")
    max_bytes: int = option(
        8 * 2**30, count(2**20), "bytes of its files; what was not read for longest is deleted", group="memory",
        metavar="BYTES",
    )  # fmt: skip


@dataclass(frozen=True)
class ECTransferConfig(Nested):
    """An encoder in an engine of its own; vLLM's names. Off where there is no ec_connector."""

    name: ClassVar[str] = "ec_transfer_config"

    ec_connector: str | None = option(
        None, optional(one_of(*_CONNECTORS)), "how rows travel: ECExampleConnector, by files of a folder",
        group="memory", choices=_CONNECTORS,
    )  # fmt: skip
    ec_role: str | None = option(
        None, optional(one_of(_PRODUCER, _CONSUMER, _BOTH)), "whether rows are written (ec_producer, which keeps the "
        "first layers of the language model alone), read (ec_consumer), or both (ec_both)", group="memory",
        choices=(_PRODUCER, _CONSUMER, _BOTH),
    )  # fmt: skip
    engine_id: str | None = option(None, optional(text), "taken, and not used", group="memory")
    ec_connector_extra_config: dict[str, Any] | None = option(
        None, optional(json_object), "shared_storage_path, max_bytes", group="memory", metavar="JSON"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.ec_connector is None) != (self.ec_role is None):
            lacks, given = ("ec_role", "ec_connector") if self.ec_role is None else ("ec_connector", "ec_role")
            raise ValueError(f"{self.name}.{lacks} must be given, too, where {given} is")
        if self.ec_connector is not None and not self.extras.shared_storage_path:
            raise ValueError(
                f"{self.name}.ec_connector_extra_config must name a folder, such as "
                '{"shared_storage_path": "/mnt/rows"}'
            )

    @property
    def extras(self) -> ECTransferExtras:
        """ec_connector_extra_config, read."""
        found = ECTransferExtras.from_value(self.ec_connector_extra_config or {})
        assert isinstance(found, ECTransferExtras)
        return found

    @property
    def is_producer_alone(self) -> bool:
        """True if this engine encodes for others, and its own tokens mean nothing."""
        return self.ec_role == _PRODUCER

    @property
    def writes(self) -> bool:
        """True if this engine writes the rows that it has encoded."""
        return self.ec_role in (_PRODUCER, _BOTH)

    @property
    def reads(self) -> bool:
        """True if this engine reads rows before it encodes."""
        return self.ec_role in (_CONSUMER, _BOTH, _PRODUCER)
