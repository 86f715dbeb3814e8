"""Continue a prompt on a server, given as an argument or on standard input. The text goes to standard output."""

import argparse
import contextlib
import dataclasses
import sys

from quintet.cli.commands import _engine as engine
from quintet.clients import server_address as target
from quintet.config.schema import flags
from quintet.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("PROMPT", nargs="?", default=None, help="text to continue; standard input if not given")
    group = parser.add_argument_group("input and output")
    group.add_argument("--model", "-m", metavar="NAME", help="which of the server's models; its first if not given")
    group.add_argument("--quiet", "-q", action="store_true", help="print no figures to standard error")
    target.add_arguments(parser)
    unsettled = {each.name: None for each in dataclasses.fields(SamplingParams)}  # the server has its own defaults
    engine.add_sampling_arguments(
        parser, exclude=("n", "logprobs", "prompt_logprobs", "logprob_token_ids", "structured_outputs"), **unsettled
    )


def run(arguments: argparse.Namespace) -> int:
    """Streams one continuation."""
    wanted = flags.given_settings(arguments, SamplingParams)
    SamplingParams(**{"max_tokens": None, **wanted})
    prompt = engine.prompt_from_stdin("complete") if arguments.PROMPT is None else arguments.PROMPT

    from quintet.clients.remote_engine import RemoteEngine, ServerSpeed

    remote, speed = RemoteEngine(target.target(arguments), arguments.model), ServerSpeed()
    with contextlib.closing(speed.watch(remote.stream(prompt, wanted))) as outputs:
        try:
            for output in outputs:
                sys.stdout.write(output.outputs[0].text)
                sys.stdout.flush()
        finally:
            if speed.first is not None:
                print(flush=True)  # also after half an answer: the message goes to a line of its own
    if not arguments.quiet:
        engine.print_stderr(str(speed))
    return 0
