"""Makes the proposer of the speculative configuration."""

from quintet.config import EngineConfig
from quintet.engine.executor.batch_builder import BatchBuilder
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.kv_cache.manager import KVCacheManager
from quintet.engine.spec_decode.draft_model import DraftLimits, DraftModelProposer
from quintet.engine.spec_decode.drafting import Drafting
from quintet.engine.spec_decode.ngram import NgramProposer
from quintet.engine.spec_decode.proposer import Proposer


def make_drafting(
    config: EngineConfig, ranks: WorkerGroup, batches: BatchBuilder, tables: KVCacheManager, vocab_size: int
) -> Drafting | None:
    """Returns the driver of the configured proposer; None without speculative decoding."""
    spec = config.speculative_config
    if spec is None:
        return None
    proposer: Proposer = NgramProposer(spec)
    if (drafter := ranks.workers[0].drafter) is not None:
        limits = DraftLimits(config.max_num_batched_tokens, drafter.build.max_model_len, vocab_size)
        proposer = DraftModelProposer(spec.num_speculative_tokens, ranks, batches, tables, limits)
    return Drafting(proposer, vocab_size, spec.disable_by_batch_size)
