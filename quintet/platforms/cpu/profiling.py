"""Traces a step call by call: a recorded step is one native call, so steps run eagerly during a trace."""

import threading
import time
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quintet.interface.platform import RecordEvent

DESCRIPTION = "eagerly, one kernel after the other from Python; without a trace, steps of one size are one native call"
_NO_WORK = ("__get__", "empty")  # an attribute, memory


class TorchCalls(TorchFunctionMode):
    """Tells of torch's own functions that make tensors, in one step of one thread; of our kernels the engine does."""

    def __init__(self, record_event: RecordEvent) -> None:
        super().__init__()
        self._tell, self._thread = record_event, threading.get_ident()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.time_ns()
        result = func(*args, **(kwargs or {}))
        ended = time.time_ns()
        made = result[0] if isinstance(result, (tuple, list)) and result else result
        name = getattr(func, "__name__", "")
        if isinstance(made, Tensor) and name not in _NO_WORK:
            self._tell(f"{torch.__name__}.{name}", "torch", self._thread, began, ended)
        return result
