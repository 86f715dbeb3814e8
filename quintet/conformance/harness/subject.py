"""A platform under test: made as the engine makes it, and asked through the contract alone."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.config import EngineConfig, all_variables
from quintet.conformance.harness.reference_model import Tiny
from quintet.conformance.harness.worker_runner import WorkerRunner
from quintet.interface.platform import Device, Platform
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.ops import Ops, bind
from quintet.platforms import SelectedPlatform, choose


class Subject:
    """Subject("cpu"). Everything that costs something is made when it is first asked for."""

    def __init__(self, name: str, devices: int = 1, config: EngineConfig | None = None) -> None:
        self.variables = all_variables()  # before the first probe
        self.chosen: SelectedPlatform = choose(name)
        self.name, self.devices = self.chosen.platform.name, devices
        self._config = replace(config or EngineConfig(), device=name, tensor_parallel_size=devices)
        self.facts = self.chosen.capabilities

    def config(self, **settings: Any) -> EngineConfig:
        """Returns the config of an engine on this platform, with these fields changed."""
        return replace(self._config, **settings)

    def make(self, **settings: Any) -> Platform:
        """A platform of its own, with these fields of EngineConfig besides."""
        config, _ = self.chosen.platform.configure(self.config(**settings))
        return self.chosen.platform(config)

    @cached_property
    def platform(self) -> Platform:
        return self.make()

    @cached_property
    def device(self) -> Device:
        return self.platform.open(0)

    @cached_property
    def ops(self) -> Ops:
        _ = self.device  # a platform may register its providers when it is opened
        return bind(self.platform.op_priority)

    def with_new_platform(self, **settings: Any) -> "Subject":
        """The same with a platform of its own, for what is compiled: an instance serves one engine."""
        other = copy(self)
        other._config = self.config(**settings)
        for made in ("platform", "device", "ops"):
            other.__dict__.pop(made, None)
        return other

    def provider(self, op: str) -> str:
        """The provider that serves the op here."""
        return self.ops.choice(op).provider

    def up(self, x: Tensor) -> Tensor:
        """A host tensor of any type on the device: activations in half precision have no other way there."""
        device = self.device
        if x.dtype in (torch.int32, torch.float32) or x.dim() == 0:
            return device.to_device([x.contiguous().numpy()])[0]
        return self.place(x, "vector")["x"]

    def place(self, x: Tensor, use: str, dtype: torch.dtype | None = None, **more: Any) -> dict[str, Tensor]:
        """Places a checkpoint tensor "x" that one rank keeps whole; returns the platform's tensors."""
        _ = self.device  # a platform places on devices that are open
        part = CheckpointSlice("x", tuple(x.shape), ((0, x.shape[0]),))
        weight = Weight("x", (part,), 0, 0, dtype or x.dtype, use, **more)
        return dict(self.platform.place(weight, {"x": x}))

    def place_shared(self, x: Tensor, uses: Sequence[str]) -> list[Tensor]:
        """One checkpoint tensor for several layers, as the loader places it: a tied head."""
        _ = self.device  # as above
        part, tensors, shared = CheckpointSlice("x", tuple(x.shape), ((0, x.shape[0]),)), {"x": x}, []
        for use in uses:
            weight = Weight("x", (part,), 0, 0, x.dtype, use, shared=True)
            shared.append(self.platform.place(weight, tensors)["x"])
        return shared

    def down(self, x: Tensor) -> Tensor:
        """The tensor on the host; it is a copy."""
        return self.device.to_host(x)().clone()

    def runner(
        self, tiny: Tiny, dtype: torch.dtype = torch.float32, sizes: Sequence[int] = (64,), **sizing: Any
    ) -> WorkerRunner:
        """A loaded model without an engine, on a platform of its own: an instance serves one engine.

        `sizing`: other fields of Shape. A layer that the platform refuses to build is Lacking.
        """
        return WorkerRunner(tiny, self.make(), dtype, sizes=sizes, **sizing)


def int32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)
