"""Ray actor of one rank."""

from typing import Any

import torch

from quintet.config import EngineConfig
from quintet.engine.parallel.follower import follow
from quintet.interface.types import RankInfo


class RankActor:
    """Process of one rank, as Ray starts it."""

    def follow(self, fields: dict[str, Any], place: tuple[int, int, str], threads: int) -> tuple[int, str]:
        """Runs the rank until rank 0 is gone -> the exit code of a process in its place, and why it ends."""
        torch.set_num_threads(threads)
        messages: list[str] = []
        return follow(EngineConfig(**fields), RankInfo(*place), messages.append), "; ".join(messages)
