"""Stats of an engine: each part returns its own, and Stats nests them. Plain data, which processes send each other."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from typing import Any, TypeVar

MAX_LORA_NAMES = 64  # adapters that stats name: each set of names is a time series of its own
STEP_BOUNDS = (1, *(2**power for power in range(3, 15)))  # tokens of a step, up to 16384; vLLM's


@dataclass(frozen=True)
class SchedulerStats:
    """Queues, pages and the prefix cache. Counters, here and below, run from the engine's start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # share of the pages that requests hold
    num_preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found there
    external_hits: int = 0  # prompt tokens that a KV connector loaded; not among prefix_hits

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.prefix_hits + self.external_hits


@dataclass(frozen=True)
class StepStats:
    """Finished steps and their tokens."""

    num_steps: int = 0
    step_tokens: int = 0  # of the last step
    num_tokens: int = 0  # of all steps, drafts among them
    num_prompt_tokens: int = 0  # computed, so without those found in the prefix cache
    num_generation_tokens: int = 0
    num_jumped: int = 0  # of num_generation_tokens, those without a draw: grammars left no other
    # steps of up to so many tokens as each of STEP_BOUNDS says, without those before; the last are larger
    step_sizes: tuple[int, ...] = (0,) * (len(STEP_BOUNDS) + 1)


@dataclass(frozen=True)
class SpecDecodeStats:
    """Drafts and the accepted ones."""

    num_drafts: int = 0  # times that tokens of a request were guessed
    num_draft_tokens: int = 0  # that were guessed
    num_accepted_tokens: int = 0  # of them, those that were drawn
    accepted_at: tuple[int, ...] = ()  # num_accepted_tokens by their place in the guess, the first one's first
    num_disabled: int = 0  # engines whose proposer was turned off, because it failed repeatedly
    disabled_reason: str = ""  # of the first of them


@dataclass(frozen=True)
class KVConnectorStats:
    """Pages of a KV connector."""

    external_queries: int = 0  # prompt tokens that were looked for outside the cache
    pages_stored: int = 0  # that were handed over, to be found outside the cache
    pages_loaded: int = 0  # that came from there
    pages_failed: int = 0  # that were to come, and did not


@dataclass(frozen=True)
class PageTransferStats:
    """Pages from other engines, and for them."""

    pages_taken: int = 0  # from other engines; among pages_loaded
    bytes_taken: int = 0
    seconds_taken: float = 0.0  # that their transfers took
    pages_given: int = 0  # to other engines
    bytes_given: int = 0
    peers_refused: int = 0  # connections of others with another key or model, or with invalid messages
    loans_refused: int = 0  # prompts that had no room for their pages to wait for another engine


@dataclass(frozen=True)
class ExpertStats:
    """Balance of experts in the last window, and the moves so far."""

    expert_balancedness: float = 0.0  # of the ranks' loads, all layers: mean over maximum; 0: no window has ended
    expert_placements: int = 0  # times that experts moved between ranks
    experts_moved: int = 0  # that came to a rank from another one


@dataclass(frozen=True)
class LoRAStats:
    """Names of adapters, sorted, MAX_LORA_NAMES of each at most."""

    running_adapters: tuple[str, ...] = ()  # of requests that run
    waiting_adapters: tuple[str, ...] = ()  # of requests that wait


@dataclass(frozen=True)
class EncoderStats:
    """Passes of a model's encoder, and requests that needed none."""

    num_encoder_passes: int = 0
    num_encoder_hits: int = 0  # requests whose media had been encoded before; those that begin again count again


@dataclass(frozen=True)
class WeightStats:
    """Weights that are served, and whether requests wait for others."""

    weight_version: str = "default"  # as the last update named it; "" where engines differ
    weight_updates: int = 0  # times that other weights came, reload_weights() among them
    paused: int = 0  # 1: no step may start
    torn: int = 0  # 1: an update failed after it had replaced some weights, and no request is taken


@dataclass(frozen=True)
class Stats:
    """Stats of an engine, by the part that counts them."""

    scheduler: SchedulerStats = SchedulerStats()
    steps: StepStats = StepStats()
    spec_decode: SpecDecodeStats = SpecDecodeStats()
    kv_connector: KVConnectorStats = KVConnectorStats()
    page_transfer: PageTransferStats = PageTransferStats()
    experts: ExpertStats = ExpertStats()
    lora: LoRAStats = LoRAStats()
    weights: WeightStats = WeightStats()
    encoder: EncoderStats = EncoderStats()
    asleep: int = 0  # the level; 0: awake
    num_deferred: int = 0  # of those that wait, with grammars that may not be compiled yet

    def numbers(self) -> dict[str, float]:
        """Returns the fields of all parts that are one number each."""
        numbers: dict[str, float] = {}
        for name, value in asdict(self).items():
            numbers |= value if isinstance(value, dict) else {name: value}
        return {name: value for name, value in numbers.items() if not isinstance(value, tuple | str)}


T = TypeVar("T")


def total(stats: Sequence[Stats]) -> Stats:
    """Combines the stats of several engines; zeros if there are none."""
    return _total(stats) if stats else Stats()


def _total(parts: Sequence[T]) -> T:
    first: Any = parts[0]
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(first)}
    return type(first)(**{name: _combined(name, column) for name, column in columns.items()})


def _combined(name: str, column: Sequence[Any]) -> Any:
    """Returns the field of all engines together: the sum, unless a sum means nothing."""
    if name == "kv_usage":
        return sum(column) / len(column)
    if name in ("asleep", "expert_balancedness"):
        return min(column)
    if name == "weight_version":
        return column[0] if len(set(column)) == 1 else ""
    if name in ("weight_updates", "paused", "torn"):
        return max(column)
    if name in ("running_adapters", "waiting_adapters"):
        return tuple(sorted({each for names in column for each in names})[:MAX_LORA_NAMES])
    if isinstance(column[0], str):
        return next(filter(None, column), "")
    if isinstance(column[0], tuple):
        return tuple(map(sum, zip_longest(*column, fillvalue=0)))
    return sum(column) if isinstance(column[0], int | float) else _total(column)
