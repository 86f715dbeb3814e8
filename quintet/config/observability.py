"""Options for the engine's statistics in the log."""

from dataclasses import dataclass

from quintet.common.value_parsers import truth
from quintet.config.schema.fields import option


@dataclass(frozen=True)
class ObservabilityOptions:
    """Logs and figures."""

    disable_log_stats: bool = option(False, truth, "log no statistics", group="observability")
