"""Scrapes as a test reads them, and a service over the fake engine that tells everything an engine tells."""

from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families

from quintet.engine.observability.stats import (
    ExpertStats,
    KVConnectorStats,
    LoRAStats,
    SchedulerStats,
    SpecDecodeStats,
    Stats,
    StepStats,
)  # fmt: skip
from tests.server.fakes import FakeBackend

STATS = Stats(
    SchedulerStats(
        num_running=3, num_waiting=2, kv_usage=0.25, num_preemptions=1, prefix_queries=140, prefix_hits=40,
        external_hits=16,
    ),
    StepStats(
        num_steps=70, step_tokens=9, num_tokens=150, num_prompt_tokens=100, num_generation_tokens=50,
        step_sizes=(60, *[0] * 6, 10, *[0] * 6),
    ),
    SpecDecodeStats(num_drafts=9, num_draft_tokens=20, num_accepted_tokens=8, accepted_at=(5, 3)),
    KVConnectorStats(external_queries=90, pages_stored=7, pages_loaded=2, pages_failed=1),
    experts=ExpertStats(expert_balancedness=0.75, expert_placements=4, experts_moved=11),
    lora=LoRAStats(("a", "b"), ("c",)), num_deferred=1,
)  # fmt: skip


@dataclass
class TellingBackend(FakeBackend):
    """With all the figures of an engine."""

    told: Stats = field(default_factory=lambda: STATS)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model_info = replace(self.model_info, max_loras=2)

    def stats(self) -> Stats:
        return self.told


def samples(text: str) -> dict[str, float]:
    """`name{label=value}` -> value, without the labels that say the model and the engine."""
    found = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(each.labels.items()) if k not in ("model_name", "engine"))
            name = each.name + (f"{{{labels}}}" if labels else "")
            assert name not in found, f"{name} is there twice"
            found[name] = each.value
    return found
