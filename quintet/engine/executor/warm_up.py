"""Warm-up at the end of a start, on platforms that compile a kernel when it is first called."""

import logging
import time

from quintet.chat.prompts import Prompt
from quintet.engine.engine import Engine
from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.engine.request import CoreRequest
from quintet.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Tokens of the two prompts: kernels are chosen by a step's tokens, up to 16 or 64, and more.
SHORT, LONG = 48, 1024
GREEDY = SamplingParams(temperature=0, detokenize=False)
SAMPLED = SamplingParams(temperature=1, top_k=50, top_p=0.9, detokenize=False)


def warm_up(engine: Engine, vocab: int, longest: int, bounds: PoolingBounds | None) -> None:
    """Runs a prompt and two tokens, greedy and drawn; of a pooling model, one text.

    `engine` is one of its own over the ranks that will serve, with bookkeeping (pages, counters, requests) that is
    dropped: what it wrote to the cache is never read. `longest`: max_model_len. A request that fails is logged:
    those of users fail with their own errors.
    """
    if longest < 2:
        return
    start, failures = time.perf_counter(), 0
    for count, params in ((SHORT, GREEDY), (LONG, SAMPLED))[: 1 if bounds is not None else 2]:
        ids = [at % vocab for at in range(max(1, min(count, longest - 2)))]
        if bounds is None:
            engine.add(CoreRequest("warm-up", ids, params, (0, 0), 2))
        else:
            engine.add(bounds.admit("warm-up", Prompt(ids), bounds.resolve_params(None)))
        while engine.busy:
            for failed in filter(None, [delta.error for delta in engine.step()]):
                if bounds is not None:  # a pooler may want special tokens that this text has not; its step has run
                    logger.debug("warm-up: %s", failed)
                    continue
                failures += 1
                logger.warning("the warm-up's request failed, and those of users may fail alike: %s", failed)
    if not failures:
        logger.info("warmed up in %.1f s", time.perf_counter() - start)
