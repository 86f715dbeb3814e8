"""Threads that read adapters, and those that compute digests."""

import os
import threading
from pathlib import Path

import pytest
import torch

from quintet.engine.lora.manager import READERS
from quintet.engine.lora.readers import READERS_NICE
from quintet.lora.adapter import adapter_digest, write_adapter
from tests.engine.lora.shelves import WAIT, Shelf, engine_of, named


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {"q_proj.lora_A.weight": torch.ones(1, 4), "q_proj.lora_B.weight": torch.ones(4, 1)}
    write_adapter(tmp_path / "adapter", {"peft_type": "LORA", "r": 1, "lora_alpha": 1}, tensors)
    return tmp_path / "adapter"


def test_adapters_load_where_priorities_may_not_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "setpriority", refuse)
    lora = engine_of(Shelf(), 1, 2).engine.lora
    assert lora is not None and lora.load(named("a")).wait() == ""


@pytest.mark.parametrize(("nice", "wanted"), [(0, READERS_NICE), (15, 15)])
def test_a_process_of_low_priority_keeps_it(nice: int, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(os, "getpriority", lambda *_: nice)
    monkeypatch.setattr(os, "setpriority", lambda which, who, to: given.append(to))
    lora = engine_of(Shelf(), 1, 2).engine.lora
    assert lora is not None and lora.load(named("a")).wait() == ""
    assert set(given) <= {wanted}


def test_a_digest_waits_for_no_adapter(folder: Path) -> None:
    shelf = Shelf()
    lora = engine_of(shelf, 1, READERS).engine.lora
    assert lora is not None
    names = [f"a{number}" for number in range(READERS)]
    shelf.gates = {name: threading.Event() for name in names}
    adapters = [lora.load(named(name)) for name in names]
    for _ in names:
        assert shelf.started.acquire(timeout=WAIT)
    assert lora.digests.of(folder) == adapter_digest(folder)
    for name, adapter in zip(names, adapters, strict=True):
        assert not adapter.ready
        shelf.gates[name].set()
        assert adapter.wait() == ""


def test_a_closed_engine_computes_no_digest(folder: Path) -> None:
    lora = engine_of(Shelf(), 1, 2).engine.lora
    assert lora is not None
    lora.close()
    with pytest.raises(RuntimeError, match=r"^the engine was closed$"):
        lora.digests.of(folder)
