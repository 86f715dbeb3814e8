"""Runs a Worker of two models, which take turns on one cache, without an engine."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quintet.conformance.harness.reference_model import SERVED, Tiny
from quintet.conformance.harness.worker_runner import WorkerRunner
from quintet.engine.executor.model_part import DrafterSizes, ModelSizes
from quintet.interface.platform import Platform
from quintet.model_loader.weight_files import WeightFiles


class TurnsRunner(WorkerRunner):
    """Two loaded models, and requests whose tokens go through both."""

    def __init__(self, first: Tiny, second: Tiny, platform: Platform, dtype: torch.dtype) -> None:
        sizes = ModelSizes(dtype, 16, SERVED)
        drafter = DrafterSizes(second.config, sizes, WeightFiles(second.folder))
        super().__init__(first, platform, dtype, sizes=(64,), page_size=sizes.page_size, drafter=drafter)
        self._first_begins = True

    def step(self, chunks: Mapping[Any, Sequence[int]]) -> dict[Any, Tensor]:
        """Runs each request's next tokens through both models, of which each begins in its turn -> logits
        [T, 2 * vocab], per request: the first model's, then the second's."""
        host = self.padded_batch(chunks)
        models = [self.worker.run, self.worker.draft][:: 1 if self._first_begins else -1]
        outputs = []
        for run in models:
            logits = run(host).logits
            assert logits is not None
            outputs.append(self.host_outputs(chunks, logits))
        first, second = outputs[:: 1 if self._first_begins else -1]
        self._first_begins = not self._first_begins
        return {key: torch.cat([first[key], second[key]], -1) for key in chunks}
