"""Continue prompts, given as arguments or, as one prompt, on standard input. The text goes to standard output."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quintet.cli.chat.pictures import HELP, content_of, picture_part
from quintet.cli.commands import _engine as engine
from quintet.config.schema import flags
from quintet.lora.request import LoRARequest
from quintet.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quintet import LLM, RequestOutput
    from quintet.outputs import LogprobsAt

MAX_TOKENS = 256  # a base model may never end by itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "PROMPT", metavar="[MODEL] PROMPT", nargs="*", default=[],
        help="text to continue; standard input if there is none. A first word that names a model (a file, a folder, "
        "OWNER/NAME, OWNER/NAME:QUANTIZATION, bundled) is the model; with --model, or after --, all are prompts",
    )  # fmt: skip
    group = parser.add_argument_group("input and output")
    group.add_argument("--chat", action="store_true", help="send each prompt as a user's message, in the chat template")
    group.add_argument("--system", metavar="TEXT", help="a system message before it; means --chat")
    group.add_argument("--prompts-file", metavar="FILE", help="a prompt on each line of this file; -: standard input")
    group.add_argument("--json", action="store_true", help="print one JSON object per prompt, with token ids")
    group.add_argument("--quiet", "-q", action="store_true", help="print no figures to standard error")
    add_adapter_argument(group, "the prompts are answered with")
    add_image_argument(group, "prompts, in a chat (--chat)")
    engine.add_sampling_arguments(parser, max_tokens=MAX_TOKENS)
    engine.add_arguments(parser, exclude=("seed",))


def run(arguments: argparse.Namespace) -> int:
    """Streams one answer, or prints several in order."""
    arguments.PROMPT = engine.take_model(arguments, arguments.PROMPT, arguments.prompts_file is not None)
    prompts = _prompts(arguments)
    wanted = flags.given_settings(arguments, SamplingParams)
    SamplingParams(**{"max_tokens": MAX_TOKENS, **wanted})  # refuses before the model is loaded
    check_adapter(arguments)
    arguments.image = [picture_part(each) for each in arguments.image]
    llm = engine.open_engine(arguments, arguments.quiet)
    try:
        params = engine.sampling_params(llm, wanted, max_tokens=MAX_TOKENS)
        one = len(prompts) == 1 and params.n == 1 and params.num_logprobs is None and not arguments.json
        return stream_one(llm, prompts[0], params, arguments) if one else _all(llm, prompts, params, arguments)
    finally:
        llm.close()


def add_adapter_argument(group: Any, use: str) -> None:
    """Adds --lora-path; `use`: what the adapter is for."""
    group.add_argument(
        "--lora-path", metavar="ADAPTER", help=f"adapter (LoRA) that {use}: a folder or hub id; needs --enable-lora"
    )


def add_image_argument(group: Any, what: str) -> None:
    """Adds --image; `what`: where the pictures go."""
    group.add_argument("--image", metavar="FILE", action="append", default=[], help=HELP.format(what=what))


def check_adapter(arguments: argparse.Namespace) -> None:
    """Called before the model is loaded. ValueError if there is an adapter, and adapters are off."""
    if arguments.lora_path and not engine.engine_settings(arguments).get("enable_lora"):
        raise ValueError("--lora-path needs --enable-lora; give both, or neither")


def adapter_of(arguments: argparse.Namespace) -> LoRARequest | None:
    """Returns the adapter that --lora-path names."""
    path = getattr(arguments, "lora_path", None)  # `quintet complete` has none
    return LoRARequest(Path(path).name or path, 0, path) if path else None


def _prompts(arguments: argparse.Namespace) -> list[str]:
    if arguments.prompts_file is None:
        return arguments.PROMPT or [engine.prompt_from_stdin("generate", arguments.MODEL)]
    if arguments.PROMPT:
        raise ValueError(f"--prompts-file is given and the prompt {arguments.PROMPT[0][:40]!r}, too; give one of them")
    return engine.prompts_of(arguments.prompts_file)


def _messages(prompt: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return [*system, {"role": "user", "content": content_of(prompt, arguments.image)}]


def _is_chat(arguments: argparse.Namespace) -> bool:
    return bool(arguments.chat or arguments.system or arguments.image)


def stream_one(llm: "LLM", prompt: str, params: SamplingParams, arguments: argparse.Namespace) -> int:
    """Prints one output as it comes, as text after the prompt or as an answer in a chat."""
    speed, failed = engine.TokenSpeed(), None
    lora = adapter_of(arguments)
    if _is_chat(arguments):
        outputs = llm.stream_chat(_messages(prompt, arguments), params, lora_request=lora)
    else:
        outputs = llm.stream(prompt, params, lora_request=lora)
    for output in speed.watch(outputs):
        sys.stdout.write(output.outputs[0].text)
        sys.stdout.flush()
        failed = failed or output.outputs[0].error
    print()
    return _finish(str(speed), [failed] if failed else [], arguments)


def _all(llm: "LLM", prompts: list[str], params: SamplingParams, arguments: argparse.Namespace) -> int:
    started, bar = time.perf_counter(), sys.stderr.isatty() and not arguments.quiet
    lora = adapter_of(arguments)
    if _is_chat(arguments):
        conversations = [_messages(prompt, arguments) for prompt in prompts]
        outputs = llm.chat(conversations, params, use_tqdm=bar, lora_request=lora)
    else:
        outputs = llm.generate(prompts, params, use_tqdm=bar, lora_request=lora)
    seconds = time.perf_counter() - started
    for prompt, output in zip(prompts, outputs, strict=True):
        print(json.dumps(_plain(prompt, output), ensure_ascii=False) if arguments.json else _text(prompt, output))
    total = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    errors = [each.error for output in outputs for each in output.outputs if each.error]
    return _finish(f"{total} tokens of output in {seconds:.2f} s, {total / seconds:.1f} tokens/s", errors, arguments)


def _finish(figures: str, errors: list[str], arguments: argparse.Namespace) -> int:
    if not arguments.quiet:
        engine.print_stderr(figures)
    for error in errors:
        engine.print_stderr(f"error: {error}")
    return 1 if errors else 0


def _text(prompt: str, output: "RequestOutput") -> str:
    """The prompt after a mark, then each completion, with a line for each of its tokens where those are wanted."""
    lines = [f"> {prompt}"]
    for each in output.outputs:
        lines += [each.text, *map(_token_line, each.token_ids, each.logprobs or ())]
    return "\n".join([*lines, ""])


def _token_line(token_id: int, at: "LogprobsAt") -> str:
    """The token that was drawn, and the likeliest others."""
    others = [f"{each.decoded_token!r} {each.logprob:.3f}" for other, each in at.items() if other != token_id]
    own = f"{at[token_id].logprob:10.3f}  {at[token_id].decoded_token!r}"
    return f"{own}  ({', '.join(others)})" if others else own


def _plain(prompt: str, output: "RequestOutput") -> dict[str, Any]:
    return {
        "prompt": prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "outputs": [
            {
                "text": each.text,
                "token_ids": list(each.token_ids),
                "logprobs": _logprobs(each.logprobs),
                "finish_reason": each.finish_reason,
                "stop_reason": each.stop_reason,
            }
            for each in output.outputs
        ],
    }


def _logprobs(positions: Any) -> list[dict[int, Any] | None] | None:
    if positions is None:
        return None
    return [at and {token: msgspec.structs.asdict(each) for token, each in at.items()} for at in positions]
