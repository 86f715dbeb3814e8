"""vLLM's routes for trainers: orders that the engine gets, and who may call them."""

import pytest

from quintet.engine.observability.stats import WeightStats
from quintet.engine.weight_transfer import orders
from tests.server.fakes import FakeBackend
from tests.server.http.serving import client

ON = {"enable_rl_routes": True}
POSTS = (
    *("/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/update_weight_version", "/start_draft_weight_update"),
    *("/abort_requests", "/weight_checker", "/collective_rpc", "/shutdown_weight_transfer_engine"),
)


async def test_they_are_not_there_unless_asked_for() -> None:
    async with client(FakeBackend()) as http:
        for path in POSTS:
            assert (await http.post(path)).status_code == 404
        for path in ("/is_paused", "/get_world_size", "/weight_info"):
            assert (await http.get(path)).status_code == 404


async def test_an_update_as_vllms_client_sends_it() -> None:
    backend = FakeBackend()
    names = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    group = {"master_address": "trainer", "master_port": 5, "rank_offset": 1, "world_size": 2}
    async with client(backend, **ON) as http:
        assert (await http.get("/get_world_size")).json() == {"world_size": 1}
        for path, body, answer in (
            ("/pause?mode=keep", None, {"status": "paused"}),
            ("/init_weight_transfer_engine", {"init_info": group}, {"message": "Weight transfer initialized"}),
            ("/start_weight_update", None, {"message": "Weight update started"}),
            ("/start_draft_weight_update", None, {"message": "Draft weight update started"}),
            ("/update_weights", {"update_info": names}, {"message": "Weights updated"}),
            ("/finish_weight_update", None, {"message": "Weight update finished"}),
            ("/finish_weight_update", {"weight_version": "7", "partial": True}, {"message": "Weight update finished"}),
            ("/update_weight_version", {"new_version": "8"}, {"success": True, "new_version": "8"}),
            ("/shutdown_weight_transfer_engine", None, {"message": "Weight transfer shut down"}),
            ("/resume", None, {"status": "resumed"}),
        ):
            answered = await http.post(path, json=body) if body is not None else await http.post(path)
            assert answered.status_code == 200 and answered.json() == answer
    assert backend.weights.ran == [
        orders.PauseCommand("keep"), orders.InitTransferCommand(group), orders.StartUpdateCommand(),
        orders.StartUpdateCommand(draft=True), orders.ReceiveWeightsCommand(names),
        orders.CheckUpdateCommand(), orders.FinishUpdateCommand(),
        orders.CheckUpdateCommand(True), orders.FinishUpdateCommand("7"), orders.SetVersionCommand("8"),
        orders.CloseTransferCommand(), orders.ResumeCommand(),
    ]  # fmt: skip


async def test_a_pause_that_waits_asks_until_requests_have_finished() -> None:
    backend = FakeBackend()
    backend.weights.busy = 2
    async with client(backend, **ON) as http:
        assert (await http.post("/pause?mode=wait")).status_code == 200
        assert (await http.post("/pause?mode=soon")).json()["error"]["param"] == "mode"
    assert backend.weights.ran == [orders.PauseCommand("wait")] * 3


async def test_the_version_is_in_answers_and_torn_weights_serve_none() -> None:
    backend = FakeBackend()
    async with client(backend, **ON) as http:
        ask = {"model": backend.model_info.model, "prompt": "a", "max_tokens": 1}
        before = (await http.post("/v1/completions", json=ask)).json()["system_fingerprint"]
        assert (await http.get("/weight_info")).json() == {"weight_version": "default"}
        backend.weights.stats = WeightStats("step 7", 1, paused=1)
        assert (await http.post("/v1/completions", json=ask)).json()["system_fingerprint"] == f"{before}_step 7"
        assert (await http.get("/weight_info")).json() == {"weight_version": "step 7"}
        assert (await http.get("/is_paused")).json() == {"is_paused": True}
        scrape = (await http.get("/metrics")).text
        assert 'weight_version="step 7"} 1' in scrape and "quintet:weight_updates_total" in scrape
        backend.weights.stats = WeightStats("step 7", 1, paused=1, torn=1)
        refused = await http.post("/v1/completions", json=ask)
        assert refused.status_code == 503 and "replaced in part" in refused.json()["error"]["message"]
        assert (await http.get("/ready")).status_code == 503


async def test_refusals_name_their_reason() -> None:
    backend = FakeBackend()
    backend.weights.refuses = "model.norm.weight never came"
    async with client(backend, **ON) as http:
        refused = await http.post("/finish_weight_update")
        assert refused.status_code == 409 and refused.json()["error"]["message"] == "model.norm.weight never came"
        for path, body, param in (
            ("/update_weights", {}, "update_info"),
            ("/init_weight_transfer_engine", {"init_info": 3}, "init_info"),
            ("/finish_weight_update", {"weight_version": "x" * 300}, "weight_version"),
        ):
            wrong = await http.post(path, json=body)
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == param


@pytest.mark.parametrize("path", POSTS)
async def test_the_admin_key_guards_them(path: str) -> None:
    async with client(FakeBackend(), admin_api_key="boss", api_key=("user",), **ON) as http:
        assert (await http.post(path)).status_code == 401
        asked = await http.post(path, headers={"Authorization": "Bearer user"})
        assert asked.status_code == 403 and asked.json()["error"]["code"] == "admin_only"
