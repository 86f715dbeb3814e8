"""What a step gives beside logits: hidden states, what comes out of layers, and trunks that see both ways."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel

from quintet.config import EngineConfig
from quintet.conformance.harness.manual_steps import Stretch, host_batch
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.engine.startup import prepare
from quintet.interface.platform import Platform
from quintet.interface.types import HostBatch, HostInputs
from quintet.layers.build import RequestedOutputs
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.tiny import FAMILIES, variant

LENGTHS = (23, 1, 40, 7)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=101, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=72,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    model = BertModel(config).eval()
    folder = tmp_path_factory.mktemp("bert")
    model.save_pretrained(folder)
    return folder, model


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 101, (length,), generator=generator).tolist() for length in LENGTHS]


def step(given: list[list[int]], types: list[list[int]]) -> HostBatch:
    host = host_batch([Stretch(ids, 0, []) for ids in given], 16, [])
    return host._replace(inputs=HostInputs(token_type_ids=np.array([each for row in types for each in row], np.int32)))


def reference(model: Any, ids: list[int], types: list[int]) -> Tensor:
    with torch.no_grad():
        out = model(torch.tensor([ids]), token_type_ids=torch.tensor([types]))
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def hidden_states(worker: Worker, host: HostBatch) -> Tensor:
    outputs = worker.run(host)
    assert outputs.hidden_states is not None and outputs.logits is None
    return worker.device.to_host(outputs.hidden_states)().float().clone()


def trunk(folder: Path, config: Any, platform: Platform, dtype: torch.dtype = torch.float32) -> Worker:
    worker = Worker(
        platform,
        config,
        ModelSizes(dtype, 16, 64, requested_outputs=RequestedOutputs(logits=False, hidden_states=True)),
    )
    worker.load(folder, 1, (), progress=False)
    return worker


def test_a_berts_hidden_states_are_transformers(bert: tuple[Path, Any]) -> None:
    """In one step, again when it is recorded and replayed, and the bits of each are those it has alone."""
    folder, model = bert
    worker, given = trunk(folder, model.config, PLATFORM()), sequences()
    types = [[int(place > len(ids) // 2) for place in range(len(ids))] for ids in given]
    wanted = torch.cat([reference(model, *each) for each in zip(given, types, strict=True)])
    alone = torch.cat([hidden_states(worker, step([ids], [kinds])) for ids, kinds in zip(given, types, strict=True)])
    for _ in range(4):
        got = hidden_states(worker, step(given, types))
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)
        assert torch.equal(got, alone)
    assert worker.layouts == () and worker.kv_cache_layout.groups == ()


def test_a_berts_hidden_states_without_segments_are_those_of_segment_0(bert: tuple[Path, Any]) -> None:
    folder, model = bert
    worker, (ids, *_) = trunk(folder, model.config, PLATFORM()), sequences()
    got = hidden_states(worker, host_batch([Stretch(ids, 0, [])], 16, []))
    torch.testing.assert_close(got, reference(model, ids, [0] * len(ids)), atol=2e-5, rtol=0)


def test_a_bert_has_no_taps_and_says_so(bert: tuple[Path, Any]) -> None:
    with pytest.raises(ValueError, match="no taps of its layers"):
        Worker(
            PLATFORM(),
            bert[1].config,
            ModelSizes(torch.float32, 16, 64, requested_outputs=RequestedOutputs(logits=False, aux_hidden_states=(1,))),
        )


def test_a_bert_generates_nothing_and_says_so(bert: tuple[Path, Any]) -> None:
    settings = {"model": str(bert[0]), "device": "cpu", "skip_tokenizer_init": True}
    with pytest.raises(ValueError, match="'BertModel', which is no class that generates text"):
        prepare(EngineConfig(**settings, runner="generate"))
    with pytest.raises(ValueError, match="bert gives hidden states and no logits"):
        prepare(EngineConfig(**settings, hf_overrides={"architectures": None}))
    assert prepare(EngineConfig(**settings)).pooling is not None


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "gpt2", "opt"])
def test_a_model_gives_hidden_states_and_taps_as_it_was_built_for(family: str) -> None:
    """Taps of layer i are what goes into it, as transformers' hidden_states; the last is what comes out of all."""
    name = next(iter(FAMILIES[family]))
    tiny, (ids, *_) = variant(family, name), sequences()
    count = tiny.config.num_hidden_layers
    sizes = ModelSizes(
        torch.float32, 16, 64, requested_outputs=RequestedOutputs(hidden_states=True, aux_hidden_states=(0, 1, count))
    )
    worker = Worker(PLATFORM(), tiny.config, sizes)
    worker.load(tiny.folder, 12, (), progress=False)
    groups = worker.kv_cache_layout.groups
    pages = [range(1 + 3 * index, 4 + 3 * index) for index in range(len(groups))]
    outputs = worker.run(host_batch([Stretch(ids, 0, pages)], 16, groups))
    assert outputs.hidden_states is not None and outputs.logits is not None and len(outputs.aux_hidden_states) == 3
    with torch.no_grad():
        states = [x[0] for x in tiny.reference(torch.tensor([ids]), output_hidden_states=True).hidden_states]
    torch.testing.assert_close(outputs.aux_hidden_states[0], states[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(outputs.aux_hidden_states[1], states[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(outputs.hidden_states, states[-1], atol=1e-4 * float(states[-1].abs().max()), rtol=0)
    torch.testing.assert_close(outputs.logits, tiny.logits(ids), atol=1e-3, rtol=0)
