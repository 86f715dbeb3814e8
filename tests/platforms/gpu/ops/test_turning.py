"""Layers leave the turning of q and k to a mixer that turns and keeps at once, and only where nothing else is done."""

from typing import Any

import pytest
import torch

from quintet.conformance.harness.worker_runner import random_prompts
from quintet.ops import Op
from quintet.ops.attention import rotary_write_kv
from quintet_tools.checkpoints.tiny import FAMILIES, make
from tests.helpers.platforms.run_model import Runner
from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime

CALLS: list[Any] = []


@rotary_write_kv.provide("counting")
def _counting(q: Any, k: Any, v: Any, rotary: Any, kv: Any, context: Any) -> Any:
    CALLS.append(rotary)
    return rotary_write_kv.reference(q, k, v, rotary, kv, context)


def outputs(family: str, settings: dict[str, Any], *order: str) -> list[torch.Tensor]:
    """Of a prompt, and of two tokens after it."""
    kind = type("Turning", (FakeGPU,), {"_fake": FakeRuntime(), "op_priority": {"rotary_write_kv": order}})
    run = Runner(make(family, settings), platform=kind())
    (prompt,) = random_prompts(3, (9,), 90)
    first = [run.step({"it": each})["it"] for each in (prompt, [5])]
    CALLS.clear()
    return [*first, run.step({"it": [17]})["it"]]


@pytest.mark.parametrize(
    ("family", "layers", "norms", "neighbours"),
    [
        *(("llama", "all", False, False), ("qwen3", "all", True, False), ("cohere2", "some", False, True)),
        *(("gpt_oss", "all", False, False), ("gemma3_text", "all", True, False), ("qwen3_next", "some", True, False)),
        *(("llama4_text", "none", False, False), ("gemma3n_text", "some", True, False), ("gpt2", "none", False, False)),
        ("deepseek_v2", "none", False, False),
    ],
)
def test_a_layer_turns_and_keeps_at_once_or_as_it_did(family: str, layers: str, norms: bool, neighbours: bool) -> None:
    settings = next(iter(FAMILIES[family].values()))
    want = outputs(family, settings)
    assert not CALLS, "nobody named a provider"
    got = outputs(family, settings, "counting")
    each = [torch.equal(a, b) for a, b in zip(got, want, strict=True)]
    assert all(each)
    count = settings.get("num_hidden_layers", 2)
    assert len(CALLS) in {"all": [count], "none": [0]}.get(layers, range(1, count))
    assert all((turn.norms is not None, turn.interleaved) == (norms, neighbours) for turn in CALLS)


def test_what_was_asked_to_be_the_specification_is() -> None:
    from quintet.ops import bind

    assert bind({"rotary_write_kv": ("counting",)}).served("rotary_write_kv")
    assert not bind({"rotary_write_kv": ("counting",)}, {"rotary_write_kv": "reference"}).served("rotary_write_kv")
    assert not bind({}).served("rotary_write_kv") and not bind({}).bound
    assert Op.registry["rotary_write_kv"] is rotary_write_kv
