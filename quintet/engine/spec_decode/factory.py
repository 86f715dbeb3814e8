"""Makes the proposer of the speculative configuration."""

from quintet.config import SpeculativeConfig
from quintet.engine.spec_decode.drafting import Drafting
from quintet.engine.spec_decode.ngram import NgramProposer


def make_drafting(config: SpeculativeConfig | None, vocab_size: int) -> Drafting | None:
    """Returns the driver of the configured proposer; None without speculative decoding."""
    if config is None:
        return None
    return Drafting(NgramProposer(config), vocab_size, config.disable_by_batch_size)
