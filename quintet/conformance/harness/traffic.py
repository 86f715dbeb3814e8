"""Random traffic through a whole engine: requests, their outputs, and the tokens that the reference would give."""

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quintet.chat.prompts import Prompt
from quintet.conformance.check import ContractViolation, NotSupported, require
from quintet.conformance.harness.fault_injection import Interruption, Trap
from quintet.conformance.harness.reference_model import SERVED, VOCAB, Tiny
from quintet.conformance.harness.subject import Subject
from quintet.engine.input_processor import InputProcessor, ModelLimits
from quintet.engine.observability.stats import Stats
from quintet.engine.request import random_key
from quintet.engine.startup import launch, prepare
from quintet.interface.platform import Capabilities
from quintet.ops.sampling import Draw, sample
from quintet.outputs import TokenDelta, TokenLogprobs
from quintet.sampling_params import SamplingParams

MAX_STEPS = 2000  # many times what any mix needs: an engine that takes more goes round in circles
PERTURBATIONS = 64  # small changes of the logits under which a draw may turn out otherwise
SETTINGS = {"max_model_len": SERVED, "max_num_seqs": 8}
FIXED, FREE = 32, 128  # most tokens of a step: each size is compiled where shapes are fixed; a whole prompt otherwise


@dataclass(frozen=True)
class TrafficRequest:
    """One request."""

    name: str
    prompt: list[int]
    params: SamplingParams
    arrival: int = 0  # the step before which it comes


@dataclass
class TrafficOutput:
    """Output of the engine for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None  # why it ended; None if it was taken back
    error: str | None = None
    cached: int = 0  # tokens of its prompt that were found in the prefix cache
    preemptions: int = 0

    def add_delta(self, delta: TokenDelta) -> None:
        if self.reason is not None:
            raise ContractViolation(
                f"request {delta.request_id} has ended ({self.reason}), and goes on with {delta.token_ids}"
            )
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.reason, self.error = delta.finish_reason, delta.error
        self.cached, self.preemptions = delta.num_cached, delta.num_preemptions


class TrafficEngine:
    """An engine on the platform under test; with a trap, its steps can be made to fail."""

    def __init__(self, subject: Subject, tiny: Tiny, trap: Trap | None = None, **settings: Any) -> None:
        """`settings`: fields of EngineConfig. Lacking, if no engine can be made of them here."""
        chosen = subject.chosen
        if trap is not None:
            chosen = replace(chosen, platform=trap.wrap_platform(chosen.platform))
        plain = {"dtype": dtype_name(plain_dtype(subject.facts)), "max_num_batched_tokens": FREE}
        if subject.facts.static_shapes:
            plain["max_num_batched_tokens"] = FIXED
        config = subject.config(model=str(tiny.folder), skip_tokenizer_init=True, **{**SETTINGS, **plain, **settings})
        with quiet_logs():
            try:
                prepared = prepare(config, chosen)
            except ValueError as reasons:
                raise NotSupported(str(reasons)) from None
            self.engine = launch(prepared, progress=False)
        bounds = ModelLimits(prepared.vocab_size, prepared.memory_plan.max_model_len, config.max_logprobs)
        self._admission = InputProcessor(bounds, None, frozenset(), seed=0)
        self.interruptions = 0  # that came out of step()
        self._said: dict[str, TrafficOutput] = {}

    @property
    def stats(self) -> Stats:
        return self.engine.stats()

    def add(self, ask: TrafficRequest) -> None:
        self._said[ask.name] = TrafficOutput()
        for request in self._admission.admit(ask.name, Prompt(ask.prompt), ask.params):
            self.engine.add(request)

    def abort(self, name: str) -> None:
        self.engine.abort([name])

    def run(
        self, asks: Sequence[TrafficRequest], between: Callable[[int], None] = lambda step: None
    ) -> dict[str, TrafficOutput]:
        """Adds each request before the step it arrives at, steps until all have ended, and checks the books."""
        self._said = {}
        waiting, step = sorted(asks, key=lambda ask: ask.arrival), 0
        while waiting or self.engine.busy:
            while waiting and waiting[0].arrival <= step:
                self.add(waiting.pop(0))
            self._step()
            between(step)
            step += 1
            require(step < MAX_STEPS, f"requests still run after {step} steps: {sorted(self._said)}")
        left = self.stats.scheduler.kv_usage
        require(left == 0, f"all requests have ended, and they hold {left:.0%} of the pages")
        return self._said

    def _step(self) -> None:
        try:
            with quiet_logs():
                deltas = self.engine.step()
        except Interruption:
            self.interruptions, deltas = self.interruptions + 1, []
        for delta in deltas:
            self._said[delta.request_id].add_delta(delta)
        self.engine.check_integrity()


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Keeps expected failures out of the log."""
    logger = logging.getLogger("quintet")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def random_requests(seed: int, count: int = 6, most: int = 12) -> list[TrafficRequest]:
    """Prompts with shared beginnings, lengths around the borders of pages, greedy and random draws, any arrival."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, VOCAB) for _ in range(70)] for _ in range(2)]
    asks = []
    for index in range(count):
        stem = stems[index % 2][: rng.choice([1, 15, 16, 17, 33, 64])]
        prompt = stem + [rng.randrange(3, VOCAB) for _ in range(rng.choice([0, 1, 3, 20]))]
        params = SamplingParams(
            max_tokens=rng.choice([4, most // 2, most]), logprobs=rng.choice([None, 0, 3]), detokenize=False,
            ignore_eos=True, **_drawing(rng, index),
        )  # fmt: skip
        asks.append(TrafficRequest(f"{seed}.{index}", prompt, params, rng.randrange(3)))
    return asks


def _drawing(rng: random.Random, index: int) -> dict[str, Any]:
    """Returns the sampling parameters of a mix's index-th request: each kind comes up in each mix."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": rng.randrange(2**40)},
        {"temperature": 1.3, "seed": rng.randrange(99), "top_k": 7},
        {"temperature": 1.0, "seed": rng.randrange(99), "top_p": 0.8},
        {"temperature": 0.7, "seed": 5, "min_p": 0.05},
    ]
    return kinds[index % len(kinds)]


def page_filling_requests(size: int) -> list[TrafficRequest]:
    """Requests that fill a page of so many tokens, and then grow: some are preempted where pages are few."""
    rng = random.Random(size)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, detokenize=False)
    length = min(size - 2, SERVED - 20)
    return [
        TrafficRequest(f"crowd.{index}", [rng.randrange(3, VOCAB) for _ in range(length)], params) for index in range(8)
    ]


def greedy(name: str, prompt: list[int], count: int, arrival: int = 0) -> TrafficRequest:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    return TrafficRequest(name, prompt, params, arrival)


def check_tokens(tiny: Tiny, ask: TrafficRequest, output: TrafficOutput, dtype: torch.dtype = torch.float32) -> None:
    """Broken unless each token is the one that the specification draws from the reference's logits.

    Where that hangs by a thread, another token that it draws from nearly the same logits will do: platforms add in
    another order. The output may have fewer tokens than were asked for.
    """
    if not output.tokens:
        return
    logits = tiny.logits([*ask.prompt, *output.tokens[:-1]])[len(ask.prompt) - 1 :]
    drawn = _draw(logits, ask, len(ask.prompt))
    for at, (token, wanted) in enumerate(zip(output.tokens, drawn.tolist(), strict=True)):
        if token != wanted and token not in _near_draws(logits[at], ask, len(ask.prompt) + at, dtype):
            raise ContractViolation(
                f"request {ask.name}, token {at + 1} of {len(output.tokens)}: got {token}, the specification draws "
                f"{wanted} from the reference's logits ({logits[at, token]:.4f} and {logits[at, wanted]:.4f})"
            )


def _draw(logits: Tensor, ask: TrafficRequest, first: int, same: bool = False) -> Tensor:
    """Tokens of rows [N, V] that follow each other from position `first` on; or, if `same`, all stand there."""
    count, params = logits.shape[0], ask.params
    positions = torch.full((count,), first) if same else torch.arange(first, first + count)
    key = torch.tensor([random_key(params.seed or 0, 0)], dtype=torch.int32)
    draw = Draw(
        torch.full((count,), params.temperature),
        torch.full((count,), max(params.top_k, 0), dtype=torch.int32),
        torch.full((count,), params.top_p),
        torch.full((count,), params.min_p),
        key.expand(count, 2),
        positions.to(torch.int32),
    )
    tokens: Tensor = sample.reference(logits, draw, logits.shape[1])
    return tokens


def _near_draws(logits: Tensor, ask: TrafficRequest, position: int, dtype: torch.dtype) -> set[int]:
    """Returns the tokens drawn from logits that differ by as much as the dtype may make them differ."""
    generator = torch.Generator().manual_seed(position)
    noise = torch.randn(PERTURBATIONS, logits.shape[0], generator=generator) * logits_tolerance(dtype) * logits.std()
    return set(_draw(logits + noise, ask, position, same=True).tolist())


def logits_tolerance(dtype: torch.dtype) -> float:
    """Returns the tolerance of a model's logits against the reference's in float32, as a share of their spread."""
    return 1e-4 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps


def page_size(subject: Subject) -> int:
    """Tokens in a page, as the platform settles it."""
    return subject.chosen.platform.configure(subject.config())[0].page_size


def plain_dtype(facts: Capabilities) -> torch.dtype:
    """float32 where the device computes in it, where two ways of adding differ least; else its best."""
    return torch.float32 if torch.float32 in facts.dtypes else facts.dtypes[0]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
