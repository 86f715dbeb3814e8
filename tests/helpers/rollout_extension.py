"""Extensions of workers that make the calls of verl's and OpenRLHF's, for tensors in host memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from quintet.engine.weight_transfer.process_group import broadcast, join_group


class OpenRLHFExtension:
    """As openrlhf/trainer/ray/vllm_worker_wrap.py (August 2026): a group, and a call for each tensor."""

    device: torch.device
    rank: int
    model_config: Any
    model_runner: Any

    def init_process_group(
        self, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str, use_ray: bool
    ) -> None:
        assert name and not use_ray
        self._model_update_group = join_group(address, port, self.rank + rank_offset, world_size, backend)

    def update_weight(self, name: str, dtype: torch.dtype, shape: Sequence[int], empty_cache: bool = False) -> None:
        assert dtype == self.model_config.dtype, f"mismatch dtype: src {dtype}, dst {self.model_config.dtype}"
        weight = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        broadcast(self._model_update_group, weight)
        self.model_runner.model.load_weights(weights=[(name, weight)])
        del weight


class VerlExtension:
    """As verl's vLLMColocateWorkerExtension (January 2026): buckets of tensors, told of over ZeroMQ."""

    device: torch.device
    local_rank: int
    model_runner: Any

    def __new__(cls, **kwargs: Any) -> "VerlExtension":
        return super().__new__(cls)

    def monkey_patch_model(self, vocab_size: int) -> None:
        assert vocab_size and self.model_runner.model.compute_logits

    def update_weights_from_ipc(self, endpoint: str, buffer: str, peft_config: Any = None) -> None:
        if peft_config:
            self.remove_lora(123)  # type: ignore[attr-defined]
        assert self.device is not None
        socket = zmq.Context.instance().socket(zmq.REP)
        socket.connect(endpoint)
        while True:
            bucket = msgspec.msgpack.decode(socket.recv())
            raw = torch.frombuffer(bytearray(Path(buffer).read_bytes()), dtype=torch.uint8)
            weights = [(name, _tensor(raw, meta)) for name, meta in bucket["metas"].items()]
            self.model_runner.model.load_weights(weights)
            socket.send(b"")
            if bucket["is_last"]:
                break
        socket.close()


def _tensor(raw: torch.Tensor, meta: Mapping[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, meta["dtype"])
    size = dtype.itemsize * int(torch.Size(meta["shape"]).numel())
    return raw[meta["offset"] : meta["offset"] + size].view(dtype).view(meta["shape"]).clone()
