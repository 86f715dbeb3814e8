"""torch.xpu, where it differs from torch.cuda: how it captures, and that what is free is not always known."""

import logging
from typing import Any

from quintet.platforms.gpu.runtime import CaptureOptions, TorchRuntime
from quintet.platforms.host import host_memory

logger = logging.getLogger(__name__)
# Nothing in a SYCL graph may depend on an event from outside. Since torch 2.11; capture_begin() takes a pool alone.
CAPTURING = CaptureOptions("XPUGraph", {}, joins=False)


class XPURuntime(TorchRuntime):
    """Drivers of GPUs in processors, and old ones, do not tell what is free; some tell what never changes
    (pytorch #161381): what this process holds never counts as free."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, "xpu", CAPTURING)
        self._silent: set[int] = set()  # devices that do not tell

    def memory(self, index: int) -> tuple[int, int]:
        held = int(self._torch.memory_reserved(index))
        if index not in self._silent:
            try:
                free, total = super().memory(index)
                return max(0, min(free, total - held)), total
            except RuntimeError as error:
                if "free memory" not in str(error):
                    raise
                self._silent.add(index)
                logger.info("device %d does not tell what memory is free: plans count on all but ours", index)
        device = self._torch.get_device_properties(index)
        total = int(device.total_memory)
        free = max(0, total - held)
        shared = getattr(device, "is_integrated_gpu", True)  # with the host; torch 2.11 does not say
        return (min(free, host_memory().free) if shared else free), total
