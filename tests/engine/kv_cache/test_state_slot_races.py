"""Within a step nobody writes a state that another reads: kernels go through requests in any order, or at once."""

import random
from contextlib import suppress
from typing import Any

import pytest

from quintet.config import EngineConfig
from quintet.engine.engine import Engine
from quintet.engine.kv_cache.state_slots import SLOTS_PER_REQUEST, StateSlotPool
from quintet.engine.request import CoreRequest, random_key
from quintet.engine.startup import launch, prepare
from quintet_tools.checkpoints.tiny import variant
from tests.helpers.platforms.behind import Work, behind
from tests.helpers.platforms.null_engine import greedy

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
PAGE = 4
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "behind": {"overlap": True},
    "behind, fixed shapes": {"overlap": True, "static": True},
    "by priority": {"overlap": True, "scheduling_policy": "priority"},
    "drafts": {"overlap": True, "speculative_config": NGRAM},
    "drafts that states hold": {"overlap": True, "speculative_config": NGRAM, "fields": frozenset()},
    "whole prompts": {"enable_chunked_prefill": False},
    "no prefix cache": {"overlap": True, "enable_prefix_caching": False},
}


class Table:
    """Looks at each batch, as it goes to the device. What it finds is noted: an engine takes an error for a step's."""

    def __init__(self, engine: Engine) -> None:
        builder: Any = engine._runner._batches
        self._build, builder.build = builder.build, self.build
        self.faults: list[str] = []
        self.shared = self.begun = 0  # states that several requests of a step read; requests that began with one

    def build(self, plan: Any) -> Any:
        host, rows = self._build(plan)
        count = len(plan.tokens)
        table = host.groups[-1].block_table.tolist()
        reads, writes = [row[0] for row in table[:count] if row[0]], [row[1] for row in table[:count]]
        if any(any(row) for row in table[count:]):
            self.faults.append(f"padding has a state: {table}")
        if len(set(writes)) != count or 0 in writes or set(reads) & set(writes):
            self.faults.append(f"a state is written that another writes or reads: {table}")
        self.shared += len(reads) - len(set(reads))
        self.begun += sum(each.num_cached > 0 and each.num_cached == each.num_computed for each in plan.tokens)
        return host, rows


class Traffic:
    """Prompts with beginnings in common, in pairs as n=2 makes them; some leave, some steps fail, Ctrl-C comes."""

    def __init__(
        self, seed: int, tight: bool, overlap: bool = False, static: bool = False, fields: Any = None, **settings: Any
    ) -> None:
        self._work, self._rng = Work(), random.Random(seed)
        seqs = self._rng.randrange(1, 6)
        given = {"num_pages": 22, "page_size": PAGE, "max_model_len": 64, "max_num_seqs": seqs, **settings}
        given.setdefault("max_num_batched_tokens", 64 if "enable_chunked_prefill" in settings else 24)
        folder = str(variant("lfm2", "plain").folder)
        config = EngineConfig.from_kwargs(
            model=folder, device="null", load_format="dummy", skip_tokenizer_init=True, **given
        )
        chosen = behind(self._work, overlap=overlap, static_shapes=static)
        if fields is not None:
            chosen.platform.optional_spec_fields = fields
        prepared = prepare(config, chosen)
        assert (prepared.memory_plan.model_memory.kv_cache_layout.max_drafts > 0) == (
            "speculative_config" in settings and fields is None
        )
        self._work.take(prepared.ranks.workers[0].ops)
        self.engine = launch(prepared, progress=False)
        self._work.begin()
        tables = self.engine.scheduler.kv_cache_manager
        assert tables.state_slots is not None
        if tight:  # each slot that is taken was somebody's snapshot
            slots, drafts = 1 + SLOTS_PER_REQUEST * seqs, tables.state_slots.max_drafts
            tables.state_slots = StateSlotPool(slots, config.enable_prefix_caching, drafts)
        self.table, self._stem = Table(self.engine), [self._rng.randrange(3, 6) for _ in range(48)]

    def run(self) -> None:
        rng = self._rng
        for number in range(16):
            prompt = self._stem[: rng.randrange(40)] + [rng.randrange(3, 6) for _ in range(rng.randrange(1, 12))]
            params = greedy(max_tokens=rng.randrange(1, 12))
            for child in range(rng.randrange(1, 3)):
                name = f"{number}-{child}"
                key = random_key(name, 0)
                asked = CoreRequest(name, prompt, params, key, params.max_tokens or 1, priority=rng.randrange(3))
                self.engine.add(asked)
            for _ in range(rng.randrange(5)):
                self._step()
            if rng.random() < 0.2:
                self.engine.abort([f"{rng.randrange(number + 1)}-0"])
            if rng.random() < 0.1:
                self.engine.reset_prefix_cache()
            if rng.random() < 0.1:
                where = rng.choice(("launch", "run", "wait"))
                self._work.fails.append((where, self._work.step + 1, rng.choice((ValueError(), KeyboardInterrupt()))))
        while self.engine.busy:
            self._step()
        assert self.engine.scheduler.kv_cache_manager.state_slots is not None
        assert (
            self.engine.scheduler.kv_cache_manager.state_slots.num_used == 0
            and self.engine.scheduler.pool.num_used == 0
        )

    def _step(self) -> None:
        with suppress(KeyboardInterrupt):
            self.engine.step()
        self.engine.check_integrity()


@pytest.mark.parametrize("tight", [False, True], ids=["", "few slots"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_writes_a_state_that_it_reads(kind: str, tight: bool) -> None:
    runs = [Traffic(seed, tight, **KINDS[kind]) for seed in range(2)]
    for each in runs:
        each.run()
        assert not each.table.faults
    if kind not in ("no prefix cache", "whole prompts"):  # otherwise it says little
        assert sum(each.table.begun for each in runs) > 5 and sum(each.table.shared for each in runs) > 0
    assert sum(each.engine.scheduler.stats().num_preemptions for each in runs) > 0
