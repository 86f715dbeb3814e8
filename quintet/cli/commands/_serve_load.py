"""Flags of `quintet bench serve`: the requests and their rate."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.common.value_parsers import boolean, count, integer, json_object, one_of, optional, text
from quintet.config import option

NUM_PROMPTS = 100
BACKENDS = {"openai": "completions", "vllm": "completions", "openai-chat": "chat"}  # vLLM's names


def rate(value: Any) -> float:
    """A number over 0."""
    try:
        found = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = float("nan")
    if not found > 0:
        raise ValueError(f"must be requests per second, over 0, or inf, not {value!r}")
    return found


def ratio(value: Any) -> float:
    """A number from 0 to below 1."""
    try:
        found = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = float("nan")
    if not 0 <= found < 1:
        raise ValueError(f"must be from 0 to below 1, not {value!r}")
    return found


def _load(default: Any, parse: Any, help: str, **more: Any) -> Any:
    return option(default, parse, help, group="load", **more)


@dataclass(frozen=True)
class ServeLoad:
    """Requests that are sent, and their rate. vLLM's names where the meaning is the same."""

    model: str | None = _load(
        None, optional(text), "which of the server's models; its first if not given", flags=("-m",),
        aliases=("served_model_name",),
    )  # fmt: skip
    host: str | None = _load(None, optional(text), "the server's host, instead of --url")
    port: int | None = _load(None, optional(count(1)), "its port (8000)")
    backend: str | None = _load(
        None, optional(one_of(*BACKENDS)), "vLLM's name for the endpoint: openai-chat is chat, the others completions",
        choices=tuple(BACKENDS),
    )  # fmt: skip
    endpoint: str | None = _load(
        None, optional(one_of("completions", "chat", **{"/v1/completions": "completions",
                                                        "/v1/chat/completions": "chat"})),
        "completions, or chat; completions if not given and the dataset holds no messages",
        choices=("completions", "chat"),
    )  # fmt: skip
    request_rate: float = _load(
        math.inf, rate, "requests per second, at times drawn from a Poisson process; inf: all at once", metavar="R"
    )
    burstiness: float = _load(
        1.0, rate, "shape of the gamma distribution of times between requests; 1: Poisson, less: in bursts", metavar="X"
    )
    max_concurrency: int | None = _load(None, optional(count()), "most requests at once; others wait untimed")
    num_prompts: int | None = _load(
        None, optional(count()), f"requests; {NUM_PROMPTS} if not given, or the whole dataset"
    )
    warmup: int = _load(
        1, count(0), "requests before them that are not timed; the first must succeed", aliases=("num_warmups",)
    )
    input_len: int = _load(128, count(), "tokens of each random prompt", aliases=("random_input_len",))
    output_len: int | None = _load(
        None, optional(count()), "most tokens of each output; 128 if not given, of sharegpt as many as its answer has",
        aliases=("random_output_len", "sharegpt_output_len", "custom_output_len"),
    )  # fmt: skip
    random_range_ratio: float = _load(
        0.0, ratio, "random lengths from (1 - X) to (1 + X) times --input-len and --output-len", metavar="X"
    )
    random_prefix_len: int = _load(0, count(0), "tokens before each random prompt, the same in all")
    ignore_eos: bool = _load(False, boolean, "go on after the end-of-text token: outputs are as long as they may be")
    prompts: str = _load(
        "ids",
        one_of("ids", "text"),
        "random prompts are token ids or words; a chat's are words",
        choices=("ids", "text"),
    )
    vocab_size: int = _load(1000, count(), "token ids are drawn from those below this")
    dataset_name: str | None = _load(
        None, optional(one_of("random", "custom", "sharegpt")), "random, or what --dataset is: custom, a line for each "
        "prompt; sharegpt, ShareGPT's JSON file", choices=("random", "custom", "sharegpt"),
    )  # fmt: skip
    dataset: str | None = _load(
        None, optional(text), 'prompts from a file with a line for each: {"prompt": ..., "output_len": ...} or '
        '{"messages": [...]}', aliases=("dataset_path",), metavar="FILE",
    )  # fmt: skip
    trace: str | None = _load(
        None, optional(text), "requests from a file with a line for each, such as {\"arrival\": 0.5, \"input_length\": "
        "600, \"output_length\": 80}, sent at their times as token ids; outputs are as long as it says", metavar="FILE",
    )  # fmt: skip
    trace_speed: float = _load(1.0, rate, "send a trace so many times as fast", metavar="X")
    save_trace: str | None = _load(
        None, optional(text), "write what was sent as such a trace, for `quintet bench simulate`", metavar="FILE"
    )
    extra_body: dict[str, Any] | None = _load(
        None, optional(json_object), 'fields for every request, such as {"temperature": 0.7}'
    )
    seed: int = _load(0, integer, "of random prompts and arrivals")
    profile: bool = _load(
        False,
        boolean,
        "have the server trace the timed requests (it must run with --profiler-config); they take longer",
    )
    timeout: int = _load(600, count(), "seconds of silence that end a request", metavar="SECONDS")
    output_json: str | None = _load(
        None, optional(text), "write the figures to this file too", flags=("--json",), metavar="FILE"
    )
    save_result: bool = _load(False, boolean, "write them to a file with the time in its name, too")
    result_dir: str | None = _load(None, optional(text), "folder of that file", metavar="DIR")
    result_filename: str | None = _load(None, optional(text), "name of that file", metavar="FILE")
    disable_tqdm: bool = _load(False, boolean, "show no progress bar")

    def __post_init__(self) -> None:
        if self.dataset_name in ("custom", "sharegpt") and self.dataset is None:
            raise ValueError(f"dataset_name={self.dataset_name} needs a file; give --dataset-path FILE")
        if self.dataset_name == "random" and self.dataset is not None:
            raise ValueError(f"dataset_name=random, and a file, {self.dataset!r}; give one of them")
        named = BACKENDS[self.backend] if self.backend else None
        if named and self.endpoint not in (None, named):
            raise ValueError(f"backend={self.backend} is the endpoint {named}, and endpoint={self.endpoint}; give one")
        object.__setattr__(self, "endpoint", self.endpoint or named)
        if self.result_filename or self.result_dir:
            object.__setattr__(self, "save_result", True)

    @property
    def max_tokens(self) -> int:
        """Tokens of an output whose request names no number."""
        return self.output_len or 128

    def result_files(self, model: str, now: str) -> list[Path]:
        """Returns the files for the figures. `now`: the time, for a name of its own."""
        files = [Path(self.output_json)] if self.output_json else []
        if self.save_result:
            name = f"{self.backend or 'openai'}-{self.request_rate:g}qps-{model.rpartition('/')[2]}-{now}.json"
            files.append(Path(self.result_dir or ".", self.result_filename or name))
        return files
