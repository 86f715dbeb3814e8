"""Options of speculative decoding."""

from dataclasses import dataclass
from typing import Any, ClassVar

from quintet.common.value_parsers import Parse, boolean, count, finite_number, one_of, optional, text
from quintet.config.schema.fields import Nested, option

METHODS = ("ngram", "suffix", "custom_class")
_DRAFTERS = ("draft_model", "eagle", "eagle3", "mtp", "ngram_gpu")  # and all that end in _mtp
_GONE = {
    "medusa": "vLLM has no Medusa heads any more, and they are not served here",
    "mlp_speculator": "vLLM has no MLP speculators any more, and they are not served here",
}


def _not_none(parse: Parse) -> Parse:
    """Such a value, and never none at all."""

    def parse_given(value: Any) -> Any:
        if value is None:
            raise ValueError("must be given")
        return parse(value)

    return parse_given


def _method(value: Any) -> str:
    if isinstance(value, str) and value in _GONE:
        raise ValueError(f"{value!r} does not exist: {_GONE[value]}; use 'ngram' or 'suffix'")
    if value in _DRAFTERS or (isinstance(value, str) and value.endswith("_mtp")):
        raise ValueError(f"{value!r} is not there yet; use 'ngram' or 'suffix', which guess from texts so far")
    return str(one_of(*METHODS, **{"[ngram]": "ngram"})(value))


def _at_least_0(value: Any) -> float:
    number = finite_number(value)
    if number < 0:
        raise ValueError(f"must be at least 0, not {value!r}")
    return number


def _probability(value: Any) -> float:
    number = _at_least_0(value)
    if number > 1:
        raise ValueError(f"must be 0 to 1, not {value!r}")
    return number


@dataclass(frozen=True)
class SpeculativeConfig(Nested):
    """Tokens that are guessed, and checked by the model in one step; vLLM's names and defaults."""

    name: ClassVar[str] = "speculative_config"

    method: str = option(
        None, _not_none(_method), "who guesses: ngram (the text so far), suffix (the text so far, and past outputs) or "
        "custom_class (a class of an installed package)", group="scheduling", choices=METHODS,
    )  # fmt: skip
    num_speculative_tokens: int = option(
        None, optional(count()), "most tokens guessed at once; suffix_decoding_max_tree_depth if not given with suffix",
        group="scheduling",
    )  # fmt: skip
    model: str | None = option(
        None, optional(text), "with custom_class, its proposer: package.module:Class or the name of an entry point in "
        "quintet.proposers", group="scheduling",
    )  # fmt: skip
    prompt_lookup_max: int = option(
        None, optional(count()), "most of the last tokens to look for in the text so far; 5 if neither is given, or "
        "prompt_lookup_min", group="scheduling", metavar="TOKENS",
    )  # fmt: skip
    prompt_lookup_min: int = option(
        None, optional(count()), "fewest of them; prompt_lookup_max if not given", group="scheduling", metavar="TOKENS"
    )
    disable_by_batch_size: int | None = option(
        None, optional(count(2)), "guess nothing in steps of more requests", group="scheduling", metavar="REQUESTS"
    )
    adapt_num_tokens: bool = option(
        True, boolean, "guess fewer tokens, or none, where accepted tokens and measured steps show that they cost more "
        "than they save; false: always as many as fit", group="scheduling",
    )  # fmt: skip
    suffix_decoding_max_tree_depth: int = option(
        24, count(2), "suffix: most tokens that are matched and guessed together", group="scheduling", metavar="TOKENS"
    )
    suffix_decoding_max_cached_requests: int = option(
        10000, count(0), "suffix: past outputs that are kept to guess from; 0: the request's own text alone",
        group="scheduling", metavar="REQUESTS",
    )  # fmt: skip
    suffix_decoding_max_spec_factor: float = option(
        1.0, _at_least_0, "suffix: most tokens guessed for each token that matches", group="scheduling"
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, _probability, "suffix: least share of the matches that go on with a token that is guessed",
        group="scheduling",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.prompt_lookup_max or self.prompt_lookup_min or 5
        object.__setattr__(self, "prompt_lookup_max", most)
        object.__setattr__(self, "prompt_lookup_min", self.prompt_lookup_min or most)
        if self.prompt_lookup_min > most:
            raise ValueError(
                f"{self.name}.prompt_lookup_min={self.prompt_lookup_min} is over {self.name}.prompt_lookup_max="
                f"{most}; lower it"
            )
        if self.num_speculative_tokens is None:
            if self.method != "suffix":
                raise ValueError(f"{self.name}.num_speculative_tokens must be given")
            object.__setattr__(self, "num_speculative_tokens", self.suffix_decoding_max_tree_depth)
        if (self.method == "custom_class") != (self.model is not None):
            raise ValueError(
                f"{self.name}.model must be given: package.module:Class, or the name of an entry point"
                if self.model is None
                else f"{self.name}.model is not there: no second model guesses yet; with 'custom_class' it is a class"
            )
