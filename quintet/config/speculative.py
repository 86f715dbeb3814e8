"""Options of speculative decoding."""

from dataclasses import dataclass
from typing import Any, ClassVar

from quintet.common.value_parsers import Parse, count, one_of, optional, text
from quintet.config.schema.fields import Nested, option

_DRAFTERS = ("medusa", "mlp_speculator", "ngram_gpu", "suffix")
METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")


def _not_none(parse: Parse) -> Parse:
    """Such a value, and never none at all."""

    def parse_given(value: Any) -> Any:
        if value is None:
            raise ValueError("must be given")
        return parse(value)

    return parse_given


def _method(value: Any) -> str:
    if isinstance(value, str) and value.endswith("_mtp"):  # vLLM's names by family
        return "mtp"
    if value in _DRAFTERS:
        raise ValueError(f"{value!r} is not there yet; use 'ngram', which guesses from the text so far")
    return str(one_of(*METHODS, **{"[ngram]": "ngram"})(value))


@dataclass(frozen=True)
class SpeculativeConfig(Nested):
    """Tokens that are guessed, and checked by the model in one step; vLLM's names and defaults."""

    name: ClassVar[str] = "speculative_config"

    method: str | None = option(
        None, optional(_method), "source of the drafts: ngram, the text so far; draft_model, a second model; eagle or "
        "eagle3, a head on the model's hidden states; mtp, the head in the model's own checkpoint; if not given, what "
        "`model` holds", group="scheduling", choices=METHODS,
    )  # fmt: skip
    model: str | None = option(
        None,
        optional(text),
        "folder, GGUF file or hub id of the draft model or head",
        group="scheduling",
        metavar="MODEL",
    )
    revision: str | None = option(
        None, optional(text), "its branch, tag or commit on the hub", group="scheduling", metavar="REVISION"
    )
    quantization: str | None = option(
        None, optional(text), "its quantization, as the setting of that name has it", group="scheduling",
        metavar="METHOD",
    )  # fmt: skip
    num_speculative_tokens: int = option(None, _not_none(count()), "most tokens guessed at once", group="scheduling")
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

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle_method()
        most = self.prompt_lookup_max or self.prompt_lookup_min or 5
        object.__setattr__(self, "prompt_lookup_max", most)
        object.__setattr__(self, "prompt_lookup_min", self.prompt_lookup_min or most)
        if self.prompt_lookup_min > most:
            raise ValueError(
                f"{self.name}.prompt_lookup_min={self.prompt_lookup_min} is over {self.name}.prompt_lookup_max="
                f"{most}; lower it"
            )

    def _settle_method(self) -> None:
        """A model alone says which method; each method has what it needs, and nothing else."""
        if self.method is None and self.model is None:
            raise ValueError(f"{self.name}.method must be given: {', '.join(METHODS)}")
        if self.method == "mtp" and self.model is not None:
            raise ValueError(f"{self.name}.model: method 'mtp' reads the model's own checkpoint; leave it out")
        if self.uses_model and self.method != "mtp" and self.model is None:
            raise ValueError(f"{self.name}.method={self.method!r} needs {self.name}.model, the draft model")
        given = [each for each in ("model", "revision", "quantization") if getattr(self, each) is not None]
        if given and not self.uses_model:
            raise ValueError(
                f"{self.name}.{given[0]} is for draft models and heads, and the method is {self.method!r}; leave it out"
            )

    @property
    def uses_model(self) -> bool:
        """True if a second model proposes."""
        return self.method != "ngram"
