"""Options of speculative decoding."""

from dataclasses import dataclass
from typing import Any, ClassVar

from quintet.common.value_parsers import Parse, boolean, count, finite_number, one_of, optional, text
from quintet.config.schema.fields import Nested, option

HEAD_METHODS = ("eagle", "eagle3", "dflash", "dspark", "gemma4_mtp")
METHODS = ("ngram", "suffix", "draft_model", *HEAD_METHODS, "mtp", "custom_class")
_USE_MODEL = (None, "draft_model", *HEAD_METHODS, "mtp")  # a second model proposes; None: whatever `model` holds
_GONE = {
    "medusa": "vLLM has no Medusa heads any more, and they are not served here",
    "mlp_speculator": "vLLM has no MLP speculators any more, and they are not served here",
    "extract_hidden_states": "it drafts nothing, and writes hidden states to files through a KV connector of vLLM's",
    "ngram_gpu": "the text so far is looked up on the host; use 'ngram'",
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
        raise ValueError(f"{value!r} does not exist: {_GONE[value]}; use one of {', '.join(METHODS)}")
    if isinstance(value, str) and value.endswith("_mtp") and value not in METHODS:  # vLLM's names by family
        return "mtp"
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

    method: str | None = option(
        None, optional(_method), "source of the drafts: ngram, the text so far; suffix, the text so far and past "
        "outputs; draft_model, a second model; eagle, eagle3, dflash, dspark: a head on the model's hidden states; "
        "gemma4_mtp, Gemma 4's assistant; mtp, a head in the model's own checkpoint; custom_class, a class of an "
        "installed package; if not given, what `model` holds",
        group="scheduling", choices=METHODS, aliases=("spec_method",),
    )  # fmt: skip
    num_speculative_tokens: int = option(
        None, optional(count()), "most tokens guessed at once; suffix_decoding_max_tree_depth if not given with suffix",
        group="scheduling", aliases=("spec_tokens",),
    )  # fmt: skip
    model: str | None = option(
        None, optional(text), "folder, GGUF file or hub id of the draft model or head, or 'bundled-draft'; with "
        "custom_class, a proposer: package.module:Class or the name of an entry point in quintet.proposers",
        group="scheduling", metavar="MODEL", aliases=("spec_model",),
    )  # fmt: skip
    revision: str | None = option(
        None, optional(text), "the draft model's branch, tag or commit on the hub", group="scheduling",
        metavar="REVISION",
    )  # fmt: skip
    quantization: str | None = option(
        None, optional(text), "the draft model's quantization, as the setting of that name has it", group="scheduling",
        metavar="METHOD",
    )  # fmt: skip
    draft_vocab_size: int | None = option(
        None, optional(count()), "the draft model guesses the first so many tokens of the vocabulary alone, and "
        "computes logits of no others; all if not given", group="scheduling", metavar="TOKENS",
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
        self._check_method()
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

    def _check_method(self) -> None:
        """ValueError where a method lacks what it needs, or is given what belongs to another."""
        if self.method is None and self.model is None:
            raise ValueError(f"{self.name}.method must be given: {', '.join(METHODS)}")
        if self.method == "mtp" and self.model is not None:  # as vLLM's guides have it
            object.__setattr__(self, "method", "gemma4_mtp")
        if self.method == "custom_class" and self.model is None:
            raise ValueError(f"{self.name}.model must be given: package.module:Class, or the name of an entry point")
        if self.draft_vocab_size is not None and self.method in (*HEAD_METHODS, "mtp"):
            raise ValueError(
                f"{self.name}.draft_vocab_size is for draft models; a head's own files say so; leave it out"
            )
        if self.uses_model and self.method != "mtp" and self.model is None:
            raise ValueError(f"{self.name}.method={self.method!r} needs {self.name}.model, the draft model")
        others = ["revision", "quantization", "draft_vocab_size"]
        others += ["model"] * (self.method != "custom_class")
        given = [] if self.uses_model else [each for each in others if getattr(self, each) is not None]
        if given:
            raise ValueError(
                f"{self.name}.{given[0]} is for draft models and heads, and the method is {self.method!r}; leave it out"
            )

    @property
    def uses_model(self) -> bool:
        """True if a second model proposes."""
        return self.method in _USE_MODEL
