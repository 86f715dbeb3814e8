"""What `quintet explain` says of memory is what the plan has."""

import re

from quintet.api.explain import explain
from quintet.config import EngineConfig
from quintet.engine.startup import prepare

DRAFTS = {"model": "bundled", "num_speculative_tokens": 3}


def test_a_drafters_share_of_a_page_is_what_pages_grow_by() -> None:
    alone, both = (
        EngineConfig("bundled", device="cpu", num_pages=200, speculative_config=drafts) for drafts in (None, DRAFTS)
    )
    sizes = []
    for config in (alone, both):
        prepared = prepare(config, met=False)
        prepared.ranks.close()
        sizes.append(prepared.memory_plan.model_memory.page_bytes / 2**10)
    text = explain(both).drafter
    assert [float(each) for each in re.findall(r"([\d.]+) of the ([\d.]+) KiB", text)[0]] == [
        round(sizes[1] - sizes[0], 1), round(sizes[1], 1),
    ]  # fmt: skip
    assert explain(alone).drafter == ""
