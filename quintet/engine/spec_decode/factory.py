"""Makes the proposer of the speculative configuration."""

from quintet.config import EngineConfig
from quintet.engine.executor.batch_builder import BatchBuilder
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.model_runner import StepRunner
from quintet.engine.kv_cache.manager import KVCacheManager
from quintet.engine.spec_decode.draft_head import DraftHeadProposer
from quintet.engine.spec_decode.draft_model import DraftLimits, DraftModelProposer
from quintet.engine.spec_decode.drafting import Drafting
from quintet.engine.spec_decode.ngram import NgramProposer
from quintet.engine.spec_decode.proposer import Proposer


def make_drafting(
    config: EngineConfig, sizes: ModelSizes, runner: StepRunner, batches: BatchBuilder, tables: KVCacheManager
) -> Drafting | None:
    """Returns the driver of the configured proposer; None without speculative decoding."""
    spec = config.speculative_config
    if spec is None:
        return None
    ranks, vocab_size, drafter = runner.ranks, runner.ranks.workers[0].model.vocab_size, sizes.drafter
    proposer: Proposer = NgramProposer(spec)
    if drafter is not None:
        length = drafter.sizes.max_model_len
        limits = DraftLimits(spec.num_speculative_tokens, config.max_num_batched_tokens, length, vocab_size)
        if drafter.head is None:
            proposer = DraftModelProposer(ranks, batches, tables, limits)
        else:
            proposer = DraftHeadProposer(ranks, batches, tables, runner, limits, drafter.head.token_ids)
    return Drafting(proposer, vocab_size, spec.disable_by_batch_size)
