"""Compare tokens and log-probabilities with a server, a trainer's file, or this engine itself and transformers."""

import argparse
import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from quintet.cli.commands import _engine as engine
from quintet.clients import server_address
from quintet.clients.errors import unknown_model
from quintet.common.value_parsers import boolean, count, finite_number, optional, text
from quintet.config import BUNDLED, option, read_environment
from quintet.config.schema import flags

if TYPE_CHECKING:
    from quintet import LLM
    from quintet.verification.report import Report
    from quintet.verification.verify import VerifySettings

NO_REFERENCE = "none"


@dataclass(frozen=True)
class VerifyOptions:
    """Other side of the comparison, and differences that count as close."""

    against: str | None = option(
        None, optional(server_address.server_url), "compare with the OpenAI-compatible server at this address",
        group="compare with", metavar="URL",
    )  # fmt: skip
    against_model: str | None = option(
        None, optional(text), "the server's name of the model; the first that it lists if not given",
        group="compare with", metavar="NAME",
    )  # fmt: skip
    api_key: str | None = option(
        None, optional(server_address.server_key), "the key to show to the server; OPENAI_API_KEY if not given",
        group="compare with", repr=False, metavar="KEY",
    )  # fmt: skip
    logprobs: str | None = option(
        None, optional(text), "compare with a trainer's log-probabilities: a file with an object of JSON per line, of "
        "prompt_token_ids, token_ids and logprobs", group="compare with", metavar="FILE",
    )  # fmt: skip
    reference: str | None = option(
        None, optional(text), "without either: model whose files transformers computes in float32, such as the "
        "original of a quantized one; `none`: none is computed; the same model if not given", group="compare with",
        metavar="MODEL",
    )  # fmt: skip
    prompts_file: str | None = option(
        None, optional(text), "a prompt on each line of this file, instead of ours; -: standard input",
        group="compare with", metavar="FILE",
    )  # fmt: skip
    max_tokens: int = option(32, count(1), "tokens of each output", group="compare with")
    mean_tolerance: float = option(
        0.05, finite_number, "mean difference of log-probabilities that counts as close, in nats", group="tolerance"
    )
    max_tolerance: float = option(
        2.0, finite_number, "largest difference of one position that counts as close, in nats", group="tolerance"
    )
    json: bool = option(False, boolean, "print the report as a JSON object", group="output")

    def __post_init__(self) -> None:
        if self.against and self.logprobs:
            raise ValueError("--against and --logprobs; give one of them")
        if self.reference and (self.against or self.logprobs):
            raise ValueError("--reference is for a comparison without --against and --logprobs; leave it out")
        if self.prompts_file and self.logprobs:
            raise ValueError("--prompts-file, and the tokens are those of --logprobs; leave it out")
        if not self.against and (self.against_model or self.api_key):
            raise ValueError("--against-model and --api-key mean nothing without --against; give the server's address")
        if min(self.mean_tolerance, self.max_tolerance) < 0:
            raise ValueError("--mean-tolerance and --max-tolerance are at least 0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_model_argument(parser)
    flags.add_arguments(parser, VerifyOptions)
    engine.add_arguments(parser, exclude=("skip_tokenizer_init",))


def run(arguments: argparse.Namespace) -> int:
    """Prints the report. 0 if nothing differs by more than the tolerance; 1 otherwise."""
    options = flags.from_arguments(arguments, VerifyOptions)
    report = _report(arguments, options)
    print(json.dumps(report.to_dict(), indent=1, allow_nan=False) if options.json else report)
    return 0 if report.passed else 1


def _report(arguments: argparse.Namespace, options: VerifyOptions) -> "Report":
    from quintet.verification import verify
    from quintet.verification.scores import Limits

    prompts = engine.prompts_of(options.prompts_file) if options.prompts_file else ()
    settings = verify.VerifySettings(prompts, options.max_tokens, Limits(options.mean_tolerance, options.max_tolerance))
    kwargs = {"model": BUNDLED, **engine.engine_settings(arguments)}
    if options.against:
        return _against_server(kwargs, options, settings)
    if options.logprobs:
        with engine.load(kwargs, options.json) as llm:
            return verify.verify_trainer(llm, options.logprobs, settings)
    reference = None
    if options.reference != NO_REFERENCE:
        reference = engine.config({**kwargs, **({"model": options.reference} if options.reference else {})})
    return verify.verify_itself(partial(_open, kwargs, options.json), settings, reference)


def _open(kwargs: dict[str, Any], quiet: bool, **changes: Any) -> "LLM":
    return engine.load({**kwargs, **changes}, quiet)


def _against_server(kwargs: dict[str, Any], options: VerifyOptions, settings: "VerifySettings") -> "Report":
    """Asks the server for its models first: one that is not there is found before a model is loaded."""
    from quintet.clients.remote_engine import RemoteEngine
    from quintet.verification.verify import verify_server

    key = options.api_key or read_environment().openai_api_key
    server = RemoteEngine(server_address.ServerTarget(url=options.against, api_key=key), options.against_model)
    served = server.models()
    if options.against_model and options.against_model not in served:
        raise unknown_model(str(options.against), options.against_model, served)
    with engine.load(kwargs, options.json) as llm:
        return verify_server(llm, server, settings)
