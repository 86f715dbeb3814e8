"""IO processors by vLLM's interface: what a request brings becomes texts, and their numbers an answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from quintet.io_processors import IOProcessor, Output, find
from quintet.pooling_params import PoolingParams
from quintet.server.settings import ServerConfig
from tests.server.http.serving import client
from tests.server.pooling.test_embeddings import backend


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
