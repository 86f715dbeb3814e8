"""vLLM's routes for trainers beside those of updates: ends of requests, checksums of weights, calls of workers."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from quintet.engine.weight_transfer import orders
from tests.server.fakes import FakeBackend
from tests.server.http.serving import client

ON = {"enable_rl_routes": True}
ASK = {"prompt": "a", "max_tokens": 4, "request_id": "mine"}


async def test_requests_end_by_their_names_or_all() -> None:
    backend = FakeBackend(hang=1)
    backend.weights.result = 2
    async with client(backend, **ON) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json={**ASK, "n": 2}))
        while not backend.submitted:
            await asyncio.sleep(0)
        (ask,) = backend.submitted
        ids = [f"{ask.request_id}#0", f"{ask.request_id}#1"]
        for names in (["mine"], ["other", "cmpl-mine"]):
            answer = await http.post("/abort_requests", json={"request_ids": names})
            assert answer.json() == {"status": "aborted", "aborted": 2}
            assert backend.weights.ran.pop() == orders.EndRequestsCommand(ids)
        answer = await http.post("/abort_requests", json={"request_ids": ["other"]})
        assert answer.json() == {"status": "aborted", "aborted": 0} and backend.weights.ran == []
        for body in ({}, {"request_ids": []}):
            assert (await http.post("/abort_requests", json=body)).json()["aborted"] == 2
            assert backend.weights.ran.pop() == orders.EndRequestsCommand(None)
        backend.go_on.set()
        assert (await asking).status_code == 200


async def test_checksums_are_returned_and_compared() -> None:
    backend = FakeBackend()
    backend.weights.result = [{"model.norm.weight": "aa", "lm_head.weight": "bb"}]
    async with client(backend, **ON) as http:
        found = (await http.post("/weight_checker", json={"action": "checksum"})).json()["checksums"]
        assert found == {"dp0:rank0:model.norm.weight": "aa", "dp0:rank0:lm_head.weight": "bb"}
        assert backend.weights.ran == [orders.CallWorkersCommand("weight_checksums", [], {})]

        async def compared(**more: Any) -> Any:
            return (await http.post("/weight_checker", json={"action": "compare", **more})).json()

        assert await compared(baseline=found) == {"match": True, "mismatches": [], "ranks": ["dp0:rank0"]}
        other = {**found, "dp0:rank0:lm_head.weight": "cc"}
        assert (await compared(baseline=other))["mismatches"] == ["dp0:rank0:lm_head.weight"]
        assert (await compared(baseline=found, checksums=[other]))["match"] is False
        elsewhere = {"dp1:rank0:lm_head.weight": "dd"}  # another engine's share is no difference
        assert (await compared(baseline=found, checksums=[elsewhere]))["match"] is True
        fewer = {"dp0:rank0:lm_head.weight": "bb"}
        assert (await compared(baseline=fewer))["mismatches"] == ["dp0:rank0:model.norm.weight"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"action": "reset"}, "action", "weights change by updates alone"),
        ({"action": "compare"}, "baseline", "belongs to action compare"),
        ({"action": "checksum", "baseline": {}}, "baseline", "belongs to action compare"),
        ({"action": "checksum", "checksums": [{}]}, "checksums", "with action compare"),
        ({"action": "look"}, "action", ""),
        ({}, "action", ""),
    ],
)
async def test_a_wrong_check_is_named(body: Any, param: str, words: str) -> None:
    async with client(FakeBackend(), **ON) as http:
        answer = await http.post("/weight_checker", json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param and words in error["message"]


async def test_a_trainer_asks_for_the_types_of_weights_and_the_room_for_adapters() -> None:
    backend = FakeBackend()
    backend.model_info = replace(backend.model_info, dtype="bfloat16")
    async with client(backend, **ON) as http:
        found = (await http.get("/server_info?config_format=json")).json()["vllm_config"]
        assert found["model_config"]["dtype"] == "torch.bfloat16" and found["lora_config"] is None
        assert found["parallel_config"]["data_parallel_size"] == 1
        backend.model_info = replace(backend.model_info, max_loras=2, max_lora_rank=32)
        found = (await http.get("/server_info")).json()["vllm_config"]
        assert found["lora_config"] == {"max_lora_rank": 32, "max_loras": 2, "max_cpu_loras": 2}


async def test_trls_client_of_asynchronous_grpo_as_recorded() -> None:
    """Requests of trl 1.16's experimental.async_grpo.vllm_client, in its trainer's order."""
    backend = FakeBackend()
    async with client(backend, **ON) as http:
        models = (await http.get("/v1/models")).json()
        assert models["data"][0]["max_model_len"] == backend.model_info.max_model_len
        assert (await http.get("/get_world_size")).json()["world_size"] == 1
        info = {"master_address": "10.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2, "packed": True}
        sent = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
        for path, body in (
            ("/init_weight_transfer_engine", {"init_info": info}),
            ("/pause?mode=keep", None),
            ("/start_weight_update", {"is_checkpoint_format": True}),
            ("/update_weights", {"update_info": sent}),
            ("/finish_weight_update", None),
            ("/resume", None),
        ):
            answer = await http.post(path, json=body) if body else await http.post(path)
            assert answer.status_code == 200, answer.text
    assert backend.weights.ran == [
        orders.InitTransferCommand(info), orders.PauseCommand("keep"), orders.StartUpdateCommand(),
        orders.ReceiveWeightsCommand(sent), orders.CheckUpdateCommand(), orders.FinishUpdateCommand(),
        orders.ResumeCommand(),
    ]  # fmt: skip


async def test_methods_of_workers_are_called_by_name() -> None:
    backend = FakeBackend()
    backend.weights.result = [None, {"a": 1}, [2], 3, True]
    async with client(backend, **ON) as http:
        body = {"method": "report", "args": ["x"], "kwargs": {"y": 1}, "timeout": 5}
        answer = await http.post("/collective_rpc", json=body)
        assert answer.json() == {"results": [None, {"a": 1}, [2], "3", "True"]}
        assert backend.weights.ran == [orders.CallWorkersCommand("report", ["x"], {"y": 1})]
        assert (await http.post("/collective_rpc", json={"method": "reload_weights"})).json() == {"results": [None]}
        assert backend.weights.ran[1:] == ["reload"]
        refused = await http.post("/collective_rpc", json={"method": "reload_weights", "args": ["/tmp"]})
        assert refused.status_code == 400 and "send /update_weights a folder" in refused.json()["error"]["message"]
        backend.weights.refuses = "workers have no method 'nothing'"
        assert (await http.post("/collective_rpc", json={"method": "nothing"})).status_code == 409
