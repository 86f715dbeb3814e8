"""Runs a planned step on the workers, samples, and brings what came out to the host."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from quintet.engine.batch import BatchBuilder, Buckets, Rows
from quintet.engine.logits_processors import ProcessorFailed
from quintet.engine.request import Request
from quintet.engine.sampler import LogprobTensors, Sampled, Sampler
from quintet.engine.scheduler import Plan
from quintet.engine.worker import Worker
from quintet.outputs import TokenLogprobs
from quintet.types import HostBatch

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class StepResult:
    """What a step gave: one token per sampling request, and log-probabilities where they were asked for."""

    sampling: list[Request]
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: dict[Request, list[TokenLogprobs]]
    failed: dict[Request, str] = field(default_factory=dict)  # requests that cannot go on, and why


class Ranks:
    """The workers of one model. More than one run side by side in threads, and meet in their collectives."""

    def __init__(self, size: int, make: Callable[[int], Worker]) -> None:
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="rank") if size > 1 else None
        self.workers: list[Worker] = self._each([partial(make, rank) for rank in range(size)])

    def each(self, call: Callable[[Worker], T]) -> list[T]:
        """The call on every worker, in rank order."""
        return self._each([partial(call, worker) for worker in self.workers])

    def _each(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        if self._pool is None:
            return [call() for call in calls]
        futures = [self._pool.submit(call) for call in calls]
        return [future.result() for future in futures]

    def run(self, host: HostBatch) -> Tensor:
        """One step on all ranks -> the logits, which every rank has alike."""
        if self._pool is None:
            return self.workers[0].run(host)
        return self.each(lambda worker: worker.run(host))[0]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class Runner:
    """Between the scheduler's plan and its result."""

    def __init__(self, ranks: Ranks, sampler: Sampler, page_size: int, buckets: Buckets) -> None:
        self._ranks, self._sampler, self._batches = ranks, sampler, BatchBuilder(page_size, buckets)
        self._device = ranks.workers[0].device

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        host, rows = self._batches.build(plan)
        logits = self._ranks.run(host)
        prompts = self._prompt_logprobs(logits, rows)
        requests: list[Request] = list(rows.sampling)
        failed: dict[Request, str] = {}
        sampled = self._sample(logits[: len(requests)], requests, failed) if requests else None
        if sampled is None:
            return StepResult([], [], None, prompts, failed)
        token_ids = self._device.to_host(sampled.token_ids)
        logprobs = self._fetch(sampled.logprobs) if sampled.logprobs is not None else None
        return StepResult(requests, token_ids().tolist(), logprobs, prompts, failed)

    def _sample(self, logits: Tensor, requests: list[Request], failed: dict[Request, str]) -> Sampled | None:
        """Moves requests whose own logits processor fails from `requests` to `failed`; None if nobody is left."""
        while requests:
            try:
                return self._sampler(logits.clone() if self._sampler.fallible else logits, requests)
            except ProcessorFailed as error:
                logger.error("request %s: %s", requests[error.row].request_id, error, exc_info=error)
                failed[requests.pop(error.row)] = str(error)
                logits = torch.cat([logits[: error.row], logits[error.row + 1 :]])
        return None

    def _prompt_logprobs(self, logits: Tensor, rows: Rows) -> dict[Request, list[TokenLogprobs]]:
        found, start = {}, len(rows.sampling)
        for request, first, count in rows.prompts:
            wanted = request.params.prompt_logprobs or 0
            following = request.token_ids[first + 1 : first + 1 + count]
            (token_ids,) = self._device.to_device([np.array(following, np.int32)])
            number = logits.shape[1] if wanted == -1 else wanted
            tensors = self._sampler.prompt_logprobs(logits[start : start + count], token_ids, number)
            found[request] = self._fetch(tensors)
            start += count
        return found

    def _fetch(self, tensors: LogprobTensors) -> list[TokenLogprobs]:
        """The copies are started together and waited for together."""
        waiting = [self._device.to_host(tensor) for tensor in tensors]
        ids, values, ranks = (wait().tolist() for wait in waiting)
        return [TokenLogprobs(*row) for row in zip(ids, values, ranks, strict=True)]
