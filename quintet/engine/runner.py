"""Runs a planned step on the workers, samples, and brings what came out to the host."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from quintet.engine.batch import BatchBuilder, Rows
from quintet.engine.logits_processors import ProcessorFailed
from quintet.engine.request import Request
from quintet.engine.sampler import LogprobTensors, Sampled, Sampler
from quintet.engine.scheduler import Plan
from quintet.engine.worker import Worker
from quintet.outputs import TokenLogprobs
from quintet.types import Bucket, HostBatch

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
    """Between the scheduler's plan and its result. Sampling is done on the sampler's device: it may be the host."""

    def __init__(self, ranks: Ranks, sampler: Sampler, page_size: int, buckets: Sequence[Bucket]) -> None:
        self._ranks, self._sampler, self._batches = ranks, sampler, BatchBuilder(page_size, buckets)
        self._buckets, self._device = buckets, sampler.device

    @torch.inference_mode()
    def warm_up(self, progress: bool) -> None:
        """Runs an empty step of each bucket, and all that sampling can do with its logits, to compile them now."""
        seen: set[int] = set()
        shown = progress and bool(self._buckets)
        for bucket in tqdm(self._buckets, desc="Warming up", unit="bucket", disable=not shown, leave=False):
            logits = self._logits(HostBatch.empty(bucket))
            if bucket.rows not in seen:
                seen.add(bucket.rows)
                self._sampler.warm_up(logits)
            self._device.to_host(logits)()  # waits for the step

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Callable[[], StepResult]:
        """Starts the step and the copies of what comes out of it; calling the result waits for them."""
        host, rows = self._batches.build(plan)
        logits = self._logits(host)
        prompts = self._prompt_logprobs(logits, rows) if rows.prompts else dict
        requests: list[Request] = list(rows.sampling)
        failed: dict[Request, str] = {}
        sampled = self._sample(logits, requests, failed) if requests else None
        if sampled is None:  # the caller waits for the step all the same, or it would run ahead of the device
            return self._settled(logits, lambda: StepResult([], [], None, prompts(), failed))
        token_ids, count = self._device.to_host(sampled.token_ids), len(requests)
        logprobs = None if sampled.logprobs is None else self._fetch(sampled.logprobs)

        def wait() -> StepResult:
            listed = None
            if logprobs is not None:
                listed = _listed(logprobs(), slice(count), _most(r.params.logprobs for r in requests))
            return StepResult(requests, token_ids().tolist()[:count], listed, prompts(), failed)

        return wait

    def _settled(self, logits: Tensor, result: Callable[[], StepResult]) -> Callable[[], StepResult]:
        """The result, once the logits are there."""
        if logits.shape[0] == 0:  # where shapes are free, nobody wanted any
            return result
        done = self._device.to_host(self._sampler.settle(logits))

        def wait() -> StepResult:
            done()
            return result()

        return wait

    def renew_cache(self) -> None:
        """Another cache in the place of one that a failed step may have taken with it."""
        self._ranks.each(lambda worker: worker.renew_cache())

    def _logits(self, host: HostBatch) -> Tensor:
        """One step -> its logits, where they are sampled."""
        logits, device = self._ranks.run(host), self._ranks.workers[0].device
        return logits if device is self._device else device.to_host(logits)()

    def _sample(self, logits: Tensor, requests: list[Request], failed: dict[Request, str]) -> Sampled | None:
        """Moves requests whose own logits processor fails from `requests` to `failed`; None if nobody is left."""
        while requests:
            try:
                return self._sampler(logits, requests)
            except ProcessorFailed as error:
                logger.error("request %s: %s", requests[error.row].request_id, error, exc_info=error)
                failed[requests.pop(error.row)] = str(error)
                logits = torch.cat([logits[: error.row], logits[error.row + 1 :]])
        return None

    def _prompt_logprobs(self, logits: Tensor, rows: Rows) -> Callable[[], dict[Request, list[TokenLogprobs]]]:
        """The rows after those that sample belong to prompts."""
        own, wanted = np.zeros((2, logits.shape[0]), np.int32)
        start, places = len(rows.sampling), {}
        for request, first, count in rows.prompts:
            places[request] = slice(start, start + count)
            own[places[request]] = request.token_ids[first + 1 : first + 1 + count]
            wanted[places[request]] = 1
            start += count
        most = _most(request.params.prompt_logprobs for request in places)
        fetched = self._fetch(self._sampler.prompt_logprobs(logits, own, wanted, most))

        def wait() -> dict[Request, list[TokenLogprobs]]:
            found = fetched()
            return {request: _listed(found, at, request.params.prompt_logprobs) for request, at in places.items()}

        return wait

    def _fetch(self, tensors: LogprobTensors) -> Callable[[], LogprobTensors]:
        """The same on the host. The copies are started together; calling the result waits for all."""
        waiting = [self._device.to_host(tensor) for tensor in tensors]
        return lambda: LogprobTensors(*(wait() for wait in waiting))


def _most(numbers: Iterable[int | None]) -> int:
    """The largest number of log-probabilities that is asked for; -1 is all, None is no wish."""
    asked = {number for number in numbers if number is not None}
    return -1 if -1 in asked else max(asked)


def _listed(tensors: LogprobTensors, rows: slice, num: int | None) -> list[TokenLogprobs]:
    """These rows of tensors on the host, with the `num` likeliest tokens of each; -1 is all that there are."""
    columns = slice(None if num is None or num < 0 else num + 1)
    ids, values, ranks = tensors.token_ids[rows, columns], tensors.logprobs[rows, columns], tensors.ranks[rows]
    return [TokenLogprobs(*row) for row in zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True)]
