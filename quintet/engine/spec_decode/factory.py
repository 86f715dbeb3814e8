"""Makes the proposer of the speculative configuration."""

import logging

from quintet.config import SpeculativeConfig
from quintet.engine.lora.manager import LoRARole
from quintet.engine.spec_decode.custom_class import load_proposer
from quintet.engine.spec_decode.drafting import Drafting
from quintet.engine.spec_decode.ngram import NgramProposer
from quintet.engine.spec_decode.policy import DraftPolicy
from quintet.engine.spec_decode.proposer import Proposer
from quintet.engine.spec_decode.step_costs import StepCosts
from quintet.engine.spec_decode.suffix import SuffixProposer

logger = logging.getLogger(__name__)


def make_drafting(config: SpeculativeConfig | None, vocab_size: int) -> Drafting | None:
    """Returns the driver of the configured proposer; None without speculative decoding."""
    if config is None:
        return None
    proposer = _make_proposer(config, vocab_size)
    policy = DraftPolicy(proposer.num_drafts) if config.adapt_num_tokens else None
    return Drafting(proposer, vocab_size, config.disable_by_batch_size, policy)


def make_step_costs(drafting: Drafting | None, role: LoRARole) -> StepCosts | None:
    """Returns the hook that measures steps; None where nothing needs it, or another rank measures for all. `role`: of
    this process among the ranks."""
    if drafting is None or not drafting.adapts:
        return None
    if role is LoRARole.ALONE:
        return StepCosts(drafting.set_costs)
    return StepCosts(drafting.hold_costs) if role is LoRARole.LEADS else None


def _make_proposer(config: SpeculativeConfig, vocab_size: int) -> Proposer:
    if config.method == "custom_class":
        return load_proposer(config, vocab_size)
    if config.method == "suffix":
        proposer = SuffixProposer(config)
        num_bytes = 0 if proposer.past is None else proposer.past.num_bytes
        logger.info("speculative decoding: past outputs take up to %.0f MiB of host memory", num_bytes / 2**20)
        return proposer
    return NgramProposer(config)
