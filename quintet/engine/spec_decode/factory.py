"""Makes the proposer of the speculative configuration."""

from quintet.config import SpeculativeConfig
from quintet.engine.spec_decode.custom_class import load_proposer
from quintet.engine.spec_decode.drafting import Drafting
from quintet.engine.spec_decode.ngram import NgramProposer
from quintet.engine.spec_decode.proposer import Proposer


def make_drafting(config: SpeculativeConfig | None, vocab_size: int) -> Drafting | None:
    """Returns the driver of the configured proposer; None without speculative decoding."""
    if config is None:
        return None
    return Drafting(_make_proposer(config, vocab_size), vocab_size, config.disable_by_batch_size)


def _make_proposer(config: SpeculativeConfig, vocab_size: int) -> Proposer:
    if config.method == "custom_class":
        return load_proposer(config, vocab_size)
    return NgramProposer(config)
