"""Rows of encoders that engines share by a folder (ec_transfer_config)."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quintet import LLM, SamplingParams
from quintet.config.media.ec_transfer import ECTransferConfig
from quintet.engine.row_store.shared_rows import SharedRows
from quintet.media.items import MediaItem, WireArray
from quintet.models.transformers.tower import MediaTower
from tests.helpers.media.wrappers import Made, make, picture

pytest.importorskip("PIL")

COUNT = 5
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
SMALL = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": "16M", "use_tqdm": False}
ONE, TWO = picture(40, 56, 1), picture(31, 90, 2)


@pytest.fixture(scope="module", params=["llava", "qwen3_vl"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    yield make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The digests of what encoders compute."""
    found, encode = list[bytes](), MediaTower.encode

    def counted(self: MediaTower, item: MediaItem) -> tuple[Tensor, ...]:
        found.append(item.digest)
        return encode(self, item)

    monkeypatch.setattr(MediaTower, "encode", counted)
    return found


def opened(made: Made, role: str, folder: Path, **extras: Any) -> LLM:
    transfer = {
        "ec_connector": "ECExampleConnector", "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": str(folder), **extras},
    }  # fmt: skip
    return LLM(str(made.folder), **SMALL, mm_processor_kwargs=made.wrapper.options, ec_transfer_config=transfer)


def asked(llm: LLM, text: str, pictures: list[Any], params: SamplingParams = GREEDY) -> list[int]:
    prompt = {"prompt": text, "multi_modal_data": {"image": pictures}}
    return list(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)


def test_one_engine_encodes_and_another_has_transformers_tokens(
    made: Made, tmp_path: Path, encoded: list[bytes]
) -> None:
    text, pictures = f"a {made.token} b {made.token} c", [ONE, TWO]
    producer = opened(made, "ec_producer", tmp_path)
    layers = {"llava": 1, "qwen3_vl": 3}[made.model.config.model_type]  # those that rows are added behind
    assert producer._client.engine_plan.hf_config.num_hidden_layers == layers
    asked(producer, text, pictures, SamplingParams(max_tokens=1))
    assert len(encoded) == 2 and len(list(tmp_path.glob("*.rows"))) == 2
    consumer = opened(made, "ec_consumer", tmp_path)
    assert asked(consumer, text, pictures) == made.greedy(text, pictures, COUNT)
    assert len(encoded) == 2
    other = picture(64, 64, 7)
    assert asked(consumer, f"{made.token}?", [other]) == made.greedy(f"{made.token}?", [other], COUNT)
    assert len(encoded) == 3 and len(list(tmp_path.glob("*.rows"))) == 2, "a consumer encodes what is not there"


def test_files_that_are_not_the_rows_are_passed_over(llava: Made, tmp_path: Path, encoded: list[bytes]) -> None:
    case = f"a {llava.token} b", [ONE]
    want = asked(opened(llava, "ec_both", tmp_path), *case)
    (file,) = tmp_path.glob("*.rows")
    whole = file.read_bytes()
    for damaged in (b"", whole[:-4], b"\xff" * 64, whole + bytes(2**17)):
        file.write_bytes(damaged)
        encoded.clear()
        assert asked(opened(llava, "ec_both", tmp_path), *case) == want and len(encoded) == 1
        assert file.read_bytes() == whole


def test_rows_of_other_weights_are_never_taken(
    llava: Made, tmp_path: Path, encoded: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = f"a {llava.token} b", [ONE]
    llm = opened(llava, "ec_both", tmp_path)
    asked(llm, *case)
    other = make("llava", tmp_path_factory.mktemp("other"))
    with torch.no_grad():
        for parameter in other.model.model.vision_tower.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    other.model.save_pretrained(other.folder)
    llm.reload_weights(str(other.folder))
    assert asked(llm, *case) == other.greedy(*case, COUNT)
    assert len(encoded) == 2 and len(list(tmp_path.glob("*.rows"))) == 2
    old = llava.model.state_dict()
    name = next(each for each in old if each.endswith("layers.0.mlp.fc1.bias"))
    llm.update_weights([(name, torch.zeros_like(old[name]))], partial=True)
    asked(llm, *case)
    assert len(encoded) == 3


def test_rows_of_another_configuration_or_under_a_name_are_never_taken(
    llava: Made, tmp_path: Path, encoded: list[bytes]
) -> None:
    case = f"a {llava.token} b", [ONE]
    first = asked(opened(llava, "ec_both", tmp_path), *case)
    transfer = {
        "ec_connector": "ECExampleConnector", "ec_role": "ec_both",
        "ec_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }  # fmt: skip
    other = LLM(str(llava.folder), **SMALL, ec_transfer_config=transfer, hf_overrides={"vision_feature_layer": -1})
    assert asked(other, *case) != first and len(encoded) == 2
    for picture_, count in ((ONE, 2), (TWO, 3)):  # the name of both is "cat"
        llm = opened(llava, "ec_both", tmp_path)
        prompt = {"prompt": case[0], "multi_modal_data": {"image": [picture_]}, "multi_modal_uuids": {"image": ["cat"]}}
        tokens = list(llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
        assert tokens == llava.greedy(case[0], [picture_], COUNT) and len(encoded) == count


def test_a_folder_that_is_lost_costs_time_alone(llava: Made, tmp_path: Path, encoded: list[bytes]) -> None:
    case, folder = (f"a {llava.token} b", [ONE]), tmp_path / "rows"
    llm = opened(llava, "ec_both", folder)
    want = asked(llm, *case)
    (file,) = folder.glob("*.rows")
    file.unlink()
    os.mkfifo(file)  # reading it would wait for a writer
    assert asked(opened(llava, "ec_both", folder), *case) == want
    shutil.rmtree(folder)
    lost = opened(llava, "ec_both", folder)
    asked(lost, f"{llava.token}", [TWO])
    shutil.rmtree(folder)
    folder.write_text("no folder")
    assert asked(lost, *case) == want


def test_the_oldest_files_are_deleted(tmp_path: Path) -> None:
    extras = {"shared_storage_path": str(tmp_path), "max_bytes": 2**20}
    config = ECTransferConfig("ECExampleConnector", "ec_both", None, extras)
    shared = SharedRows(config, b"one")
    pixels = [{"pixels": WireArray.of(np.array([at]))} for at in range(5)]
    items = [MediaItem("image", b"named", each, ((0, 100),)) for each in pixels]
    rows = (torch.randn(100, 900),)  # 360,000 bytes
    for at, item in enumerate(items[:2]):
        shared.save(item, rows)
        os.utime(shared._file(item), (at, at))
    assert shared.load(items[0], 1, 900) is not None  # read: the other is older now
    shared.save(items[2], rows)
    assert [shared.load(each, 1, 900) is not None for each in items] == [True, False, True, False, False]
    assert SharedRows(config, b"another").load(items[0], 1, 900) is None
    assert shared.load(items[0], 1, 901) is None and shared.load(items[0], 1, 899) is None


def test_what_cannot_be_shared_is_refused(llava: Made, tmp_path: Path) -> None:
    for given, why in (
        ({"ec_connector": "ECExampleConnector"}, "ec_role must be given"),
        ({"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}, "must name a folder"),
        ({"ec_connector": "ECMooncakeConnector", "ec_role": "ec_both"}, "ECExampleConnector"),
    ):
        with pytest.raises(ValueError, match=why):
            LLM(str(llava.folder), ec_transfer_config=given)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is no folder for rows"):
        SharedRows(
            ECTransferConfig("ECExampleConnector", "ec_both", None, {"shared_storage_path": str(tmp_path / "file")}),
            b"",
        )
    with pytest.raises(ValueError, match="is for models whose media are encoded: this model takes text alone"):
        LLM("bundled", ec_transfer_config={
            "ec_connector": "ECExampleConnector", "ec_role": "ec_both",
            "ec_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        })  # fmt: skip
