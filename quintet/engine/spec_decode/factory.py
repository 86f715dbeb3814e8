"""Makes the proposer of the speculative configuration."""

import logging

from quintet.config import EngineConfig, SpeculativeConfig
from quintet.engine.executor.batch_builder import BatchBuilder
from quintet.engine.executor.model_part import DraftHeadSizes, ModelSizes
from quintet.engine.executor.model_runner import StepRunner
from quintet.engine.kv_cache.manager import KVCacheManager
from quintet.engine.lora.manager import LoRARole
from quintet.engine.spec_decode.custom_class import load_proposer
from quintet.engine.spec_decode.draft_block import DraftBlockProposer
from quintet.engine.spec_decode.draft_head import DraftHeadProposer
from quintet.engine.spec_decode.draft_model import DraftLimits, DraftModelProposer
from quintet.engine.spec_decode.draft_reader import DraftReaderProposer
from quintet.engine.spec_decode.drafting import Drafting
from quintet.engine.spec_decode.ngram import NgramProposer
from quintet.engine.spec_decode.policy import DraftPolicy
from quintet.engine.spec_decode.proposer import Proposer
from quintet.engine.spec_decode.step_costs import StepCosts
from quintet.engine.spec_decode.suffix import SuffixProposer

logger = logging.getLogger(__name__)


def make_drafting(
    config: EngineConfig, sizes: ModelSizes, runner: StepRunner, batches: BatchBuilder, tables: KVCacheManager
) -> Drafting | None:
    """Returns the driver of the configured proposer; None without speculative decoding."""
    spec = config.speculative_config
    if spec is None:
        return None
    ranks, vocab_size, drafter = runner.ranks, runner.ranks.workers[0].model.vocab_size, sizes.drafter
    if drafter is None:
        proposer = _make_host_proposer(spec, vocab_size)
    else:
        length = drafter.sizes.max_model_len
        limits = DraftLimits(spec.num_speculative_tokens, config.step_tokens, length, vocab_size)
        if drafter.head is None:
            proposer = DraftModelProposer(ranks, batches, tables, limits)
        else:
            proposer = _head_proposer(drafter.head)(ranks, batches, tables, runner, limits, drafter.head)
    policy = DraftPolicy(proposer.num_drafts) if spec.adapt_num_tokens else None
    return Drafting(proposer, vocab_size, spec.disable_by_batch_size, policy)


def _head_proposer(head: DraftHeadSizes) -> type[DraftHeadProposer]:
    """Returns the proposer of a draft head."""
    if head.family.reads_cache:
        return DraftReaderProposer
    return DraftBlockProposer if head.family.drafts_block else DraftHeadProposer


def make_step_costs(drafting: Drafting | None, role: LoRARole) -> StepCosts | None:
    """Returns the hook that measures steps; None where nothing needs it, or another rank measures for all. `role`: of
    this process among the ranks."""
    if drafting is None or not drafting.adapts:
        return None
    if role not in (LoRARole.ALONE, LoRARole.LEADS):
        return None
    drafting.step_costs = StepCosts(drafting.set_costs if role is LoRARole.ALONE else drafting.hold_costs)
    return drafting.step_costs


def _make_host_proposer(config: SpeculativeConfig, vocab_size: int) -> Proposer:
    """Makes a proposer that computes on the host."""
    if config.method == "custom_class":
        return load_proposer(config, vocab_size)
    if config.method == "suffix":
        proposer = SuffixProposer(config)
        num_bytes = 0 if proposer.past is None else proposer.past.num_bytes
        logger.info("speculative decoding: past outputs take up to %.0f MiB of host memory", num_bytes / 2**20)
        return proposer
    return NgramProposer(config)
