"""What the engine tells of itself."""

from dataclasses import dataclass

from quintet.settings.option import option
from quintet.values import truth


@dataclass(frozen=True)
class ObservabilityOptions:
    """Logs and figures."""

    disable_log_stats: bool = option(False, truth, "log no statistics", group="observability")
