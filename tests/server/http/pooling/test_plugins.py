"""IO processors by vLLM's interface: what a request brings becomes texts, and their numbers an answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quintet.io_processors import GROUPS, IOProcessor, Output, find
from quintet.pooling_params import PoolingParams
from quintet.server.config import ServerConfig
from tests.server.http.pooling.test_embeddings import backend
from tests.server.http.serving import client


class Nearest(IOProcessor[dict[str, Any], dict[str, Any]]):
    """Which of some texts is the nearest to another."""

    def parse_data(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict) or not isinstance(data.get("among"), list):
            raise ValueError("must have to and among")
        return data

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        return PoolingParams(task="embed")

    def pre_process(self, prompt: dict[str, Any], request_id: str | None = None, **kwargs: Any) -> list[str]:
        return [prompt["to"], *prompt["among"]]

    def post_process(self, model_output: Sequence[Output], request_id: str | None = None, **kwargs: Any) -> Any:
        first, *others = (each.outputs.data for each in model_output)
        return {"nearest": int(np.argmax([first @ each for each in others])), "for": request_id}


class Older:
    """A class of its own, by the interface's older names."""

    def __init__(self, vllm_config: Any) -> None:
        self.config = vllm_config

    def parse_request(self, request: Any) -> Any:
        return request["data"] if "data" in request else request

    def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        return prompt

    async def pre_process_async(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        return self.pre_process(prompt)

    def post_process(self, model_output: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        return [each.outputs.data for each in model_output]

    async def post_process_async(self, model_output: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        return self.post_process([each async for _, each in model_output])

    def output_to_response(self, plugin_output: Any) -> Any:
        return {"mine": plugin_output}


class Renamed(IOProcessor[Any, Any]):
    """Made of the interface, by its older names."""

    def parse_request(self, request: Any) -> Any:
        if request != "as vLLM 0.17 had it":
            raise ValueError("is something else")
        return request

    def validate_or_generate_params(self, params: PoolingParams | None = None) -> PoolingParams:
        return PoolingParams(task="token_embed")

    def pre_process(self, prompt: str, request_id: str | None = None, **kwargs: Any) -> dict[str, str]:
        return {"prompt": prompt}

    def post_process(self, model_output: Sequence[Output], request_id: str | None = None, **kwargs: Any) -> Any:
        return {"shape": model_output[0].outputs.data.shape, "ids": model_output[0].prompt_token_ids}


class Bare:
    """What it must have, and no more."""

    def __init__(self, config: Any, renderer: Any) -> None:
        self.tokenizer = renderer.get_tokenizer()

    def merge_pooling_params(self, params: Any = None) -> PoolingParams:
        return PoolingParams(task="plugin")

    def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> list[int]:
        ids: list[int] = self.tokenizer(prompt)["input_ids"]
        return ids

    def post_process(self, model_output: Any, request_id: str | None = None, **kwargs: Any) -> int:
        return len(model_output[0].outputs.data)


class Failing(Bare):
    """Behind the model."""

    def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> list[int]:
        self.asked = prompt
        return super().pre_process(prompt)

    def post_process(self, model_output: Any, request_id: str | None = None, **kwargs: Any) -> int:
        raise ValueError("too late") if self.asked == "late" else RuntimeError("a secret")


async def ask(data: Any, plugin: str | None = f"{__name__}:Nearest", **body: Any) -> Any:
    async with client(backend(), io_processor_plugin=plugin) as http:
        answer = await http.post("/pooling", json={"data": data, **body})
    return answer.status_code, answer.json()


async def test_a_processor_answers() -> None:
    status, answer = await ask({"to": "sun", "among": ["moon", "sun", "star"]}, request_id="mine")
    assert status == 200 and answer["request_id"] == "mine"
    assert answer["data"] == {"nearest": 1, "for": "mine"}


async def test_what_it_refuses_is_a_400() -> None:
    status, answer = await ask("no object")
    assert (status, answer["error"]["message"]) == (400, "data: must have to and among")
    status, answer = await ask({"to": "a", "among": ["b"]}, input="c")
    assert status == 400 and "exclude each other" in answer["error"]["message"]


async def test_older_names_work_and_arrays_become_lists() -> None:
    status, answer = await ask(["one", "two"], f"{__name__}:Older")
    assert status == 200 and np.asarray(answer["mine"]).shape == (2, 16)


async def test_older_names_of_a_class_that_is_made_of_the_interface() -> None:
    status, answer = await ask("as vLLM 0.17 had it", f"{__name__}:Renamed", task="plugin")
    assert status == 200 and answer["data"]["shape"] == [len(answer["data"]["ids"]), 16]
    status, answer = await ask("", f"{__name__}:Renamed")
    assert (status, answer["error"]["message"]) == (400, "data: is something else")


async def test_one_that_has_what_it_must_have_and_no_more() -> None:
    """Its task is vLLM's word for whatever the model does."""
    status, answer = await ask("some words", f"{__name__}:Bare")
    assert status == 200 and answer["data"] == 16


async def test_what_goes_wrong_behind_the_model() -> None:
    """A ValueError is written for the caller; of anything else he is told that it failed, and no more."""
    status, answer = await ask("late", f"{__name__}:Failing")
    assert (status, answer["error"]["message"]) == (400, "too late")
    status, answer = await ask("broken", f"{__name__}:Failing")
    assert status == 500 and "secret" not in str(answer)


@pytest.mark.parametrize("group", GROUPS)
def test_packages_bring_processors_by_entry_points(group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM has it: a function that gives the class's name."""
    folder = tmp_path / "nearest-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: nearest\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{group}]\nnearest = nearest_plugin:register\n")
    (tmp_path / "nearest_plugin.py").write_text(f"def register():\n    return {f'{__name__}.Nearest'!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find("nearest") is Nearest
    with pytest.raises(ValueError, match="unknown IO processor 'nearset'; did you mean 'nearest'"):
        find("nearset")


async def test_raw_tensors_are_refused_with_the_reason() -> None:
    status, answer = await ask(
        {"prompt_token_ids": [1], "multi_modal_data": {"pixel_values": [0]}}, f"{__name__}:Older"
    )
    assert status == 400 and "models here take text alone" in answer["error"]["message"]


async def test_a_server_without_one_says_so() -> None:
    status, answer = await ask({}, None)
    assert status == 400 and "--io-processor-plugin" in answer["error"]["message"]


def test_one_that_is_not_there_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="no IO processor 'terratorch_segmentation' is installed"):
        find("terratorch_segmentation")
    with pytest.raises(ValueError, match="cannot be imported: ModuleNotFoundError"):
        find("nowhere.at_all:Class")
    with pytest.raises(ValueError, match="must be a class with pre_process and post_process"):
        find("json:JSONDecoder")
    assert ServerConfig(io_processor_plugin="x").io_processor_plugin == "x"
