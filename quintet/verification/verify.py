"""Comparison of this engine with itself, with transformers, with a server, or with a trainer's log-probabilities."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quintet.clients.remote_engine import RemoteEngine
from quintet.config import EngineConfig
from quintet.verification.engine_scores import Case, EngineScores, cases_of
from quintet.verification.prompts import default_prompts, encode_prompts
from quintet.verification.report import NOT_RUN, Check, Report, checked
from quintet.verification.scores import Comparison, Limits, SequenceScores, choices, compare
from quintet.verification.server_scores import NotComparable, ServerScores
from quintet.verification.trainer_file import read_scores
from quintet.verification.transformers_scores import NoReference, score

if TYPE_CHECKING:
    from quintet.api.llm import LLM
    from quintet.tokenizers.tokenizer import Tokenizer

CHUNK = 16  # tokens of a prompt that a step takes, where prompts are cut
CHUNKED = "in chunks and whole"  # name of a check
EXACT = Limits()

Open = Callable[..., "LLM"]  # opens the engine, with some settings changed


@dataclass(frozen=True)
class VerifySettings:
    """Prompts (texts; ours if empty), tokens of each output, and differences that count as close."""

    prompts: Sequence[str] = ()
    max_tokens: int = 32
    limits: Limits = Limits(0.05, 2.0)


def verify_itself(open_engine: Open, settings: VerifySettings, reference: EngineConfig | None) -> Report:
    """Compares an engine's outputs alone, in a batch, from cached prefixes, in chunks, and as a prompt; and with a
    float32 forward of transformers on the files of `reference`. ValueError or OSError: the engine cannot run."""
    with open_engine() as llm:
        report = _report(llm, "itself" if reference is None else "itself and transformers", settings)
        prompts = _prompts(llm, settings)
        cases, scores, text = cases_of(prompts), EngineScores(llm, settings.max_tokens), _text(llm)
        alone = scores.alone(cases)

        def check(name: str, found: Sequence[SequenceScores]) -> None:
            report.checks.append(checked(name, compare(found, alone, text), EXACT))

        check("batched and alone", scores.batched(cases))
        report.checks.append(_cached(llm, scores, cases, alone))
        given = scores.given(alone)
        check("as a prompt and as output", given)
        can_chunk = bool(llm.config.enable_chunked_prefill)
    report.checks.append(_chunked(open_engine, settings, cases, alone) if can_chunk else
                         Check(CHUNKED, NOT_RUN, reason="chunked prefill is off"))  # fmt: skip
    if reference is not None:
        report.checks.append(_reference(reference, given, settings.limits, text))
    return report


def verify_server(llm: "LLM", server: RemoteEngine, settings: VerifySettings) -> Report:
    """Compares a server's outputs and scores with an engine's, and the server's in a batch with those alone.
    ValueError: the engine cannot run, or the server cannot be reached or has no logprobs."""
    report = _report(llm, server.model, settings)
    prompts, text, limits = _prompts(llm, settings), _text(llm), settings.limits
    here = EngineScores(llm, settings.max_tokens)
    there = ServerScores(server, _tokenizer(llm), settings.max_tokens)
    try:
        alone = there.alone(prompts)
    except NotComparable as error:
        raise ValueError(f"cannot compare with {server.model!r}: {error}") from None
    _check_vocabulary(llm, alone)
    ours = here.given(alone)
    found = compare(ours, alone, text)
    report.checks.append(checked("output, here and there", _with_choices(found, ours, text), limits))
    report.checks.append(_server_prompts(there, ours, limits, text))
    for name, again in (("again, there", there.alone), ("batched and alone, there", there.batched)):
        report.checks.append(checked(name, compare(again(prompts), alone, text), limits))
    return report


def verify_trainer(llm: "LLM", file: str, settings: VerifySettings) -> Report:
    """Compares log-probabilities of a file with an engine's. OSError or ValueError: the file is wrong."""
    report = _report(llm, file, settings)
    there = read_scores(file, len(_tokenizer(llm)), _max_model_len(llm))
    here = EngineScores(llm, settings.max_tokens).given(there)
    report.checks.append(checked("log-probabilities", compare(here, there, _text(llm)), settings.limits))
    return report


def _report(llm: "LLM", against: str, settings: VerifySettings) -> Report:
    config = llm.config
    dtype = str(llm._client.engine_plan.sizes.dtype).removeprefix("torch.")
    names = ("device", "quantization", "kv_cache_dtype", "tensor_parallel_size")
    engine = {"dtype": dtype, **{name: getattr(config, name) for name in names}}
    return Report(config.model, engine, against, settings.limits)


def _max_model_len(llm: "LLM") -> int:
    return llm._client.input_processor.limits.max_model_len


def _tokenizer(llm: "LLM") -> "Tokenizer":
    tokenizer: Any = llm._client.tokenizer
    if tokenizer is None:
        raise ValueError("skip_tokenizer_init=True; leave it out: prompts are text")
    found: Tokenizer = tokenizer
    return found


def _text(llm: "LLM") -> Callable[[int], str]:
    return _tokenizer(llm).token_text


def _prompts(llm: "LLM", settings: VerifySettings) -> list[list[int]]:
    longest = _max_model_len(llm) - settings.max_tokens - 1  # a token follows what is scored
    if longest < 1:
        raise ValueError(f"max_tokens {settings.max_tokens} leaves no room in max_model_len {_max_model_len(llm)}")
    if settings.prompts:
        return encode_prompts(_tokenizer(llm), settings.prompts, longest)
    return default_prompts(_tokenizer(llm), longest)


def _cached(llm: "LLM", scores: EngineScores, cases: list[Case], alone: list[SequenceScores]) -> Check:
    name = "cached and not"
    if not llm.config.enable_prefix_caching:
        return Check(name, NOT_RUN, reason="prefix caching is off")
    found, tokens = scores.cached(cases)
    if not tokens:
        return Check(name, NOT_RUN, reason="the engine found nothing in its prefix cache; give longer prompts")
    return checked(name, compare(found, alone, _text(llm)), EXACT)


def _chunked(open_engine: Open, settings: VerifySettings, cases: list[Case], alone: list[SequenceScores]) -> Check:
    """Runs the cases in an engine that cuts prompts into pieces."""
    if max(len(case.prompt) for case in cases) <= CHUNK:
        return Check(CHUNKED, NOT_RUN, reason=f"no prompt has more than {CHUNK} tokens; give a longer one")
    with open_engine(long_prefill_token_threshold=CHUNK) as llm:
        found = EngineScores(llm, settings.max_tokens).batched(cases)
        return checked(CHUNKED, compare(found, alone, _text(llm)), EXACT)


def _reference(config: EngineConfig, given: list[SequenceScores], limits: Limits, text: Callable[[int], str]) -> Check:
    name = "transformers in float32"
    try:
        return checked(name, compare(given, score(config, given), text), limits)
    except NoReference as error:
        return Check(name, NOT_RUN, reason=str(error))


def _check_vocabulary(llm: "LLM", sequences: Iterable[SequenceScores]) -> None:
    """ValueError if a server's tokens are not of this engine's vocabulary."""
    size = len(_tokenizer(llm))
    wrong = next((token for each in sequences for token in each.ids if not 0 <= token < size), None)
    if wrong is not None:
        raise ValueError(f"the server has token {wrong}, and the vocabulary here has {size}; is it the same model?")


def _with_choices(comparison: Comparison, ours: list[SequenceScores], text: Callable[[int], str]) -> Comparison:
    """Adds the positions at which this engine would have chosen another token."""
    splits = choices(ours, text)
    return replace(comparison, splits=splits, equal=comparison.equal and not splits)


def _server_prompts(
    there: ServerScores, ours: list[SequenceScores], limits: Limits, text: Callable[[int], str]
) -> Check:
    name = "as a prompt, here and there"
    try:
        return checked(name, compare(ours, there.given(ours), text), limits)
    except NotComparable as error:
        return Check(name, NOT_RUN, reason=str(error))
