"""The kit's Runner, on the CPU unless a test says otherwise."""

from typing import Any

import torch

from quintet.conformance.harness import worker_runner as direct
from quintet.interface.platform import Platform
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.tiny import Tiny


class Runner(direct.WorkerRunner):
    """See there."""

    def __init__(
        self, tiny: Tiny, dtype: torch.dtype = torch.float32, platform: Platform | None = None, **more: Any
    ) -> None:
        super().__init__(tiny, platform or PLATFORM(), dtype, **more)
