"""Loads, unloads and queues of several models, in virtual time."""

import asyncio
import random

import pytest

from quintet.router.models.config import ModelSpec
from quintet.router.models.managed_model import ManagedModel
from quintet.router.models.planner import ModelState
from quintet.server.http.errors import ApiError
from tests.router.models.worlds import FakeEngine, World, in_virtual_time, random_world, spec

THREE = [spec("a"), spec("b"), spec("c")]  # with room for two


async def use(world: World, name: str, seconds: float = 0.0) -> FakeEngine:
    """One request -> the engine that had it."""
    model = world.model(name)
    async with world.manager.lease(model):
        engine = model.engine
        assert engine.name == name and (engine.ready or engine.dead) and not engine.asleep
        await asyncio.sleep(seconds)
        return engine


def test_several_requests_start_a_model_once() -> None:
    async def main() -> None:
        world = World()
        world.make(THREE).start()
        engines = await asyncio.gather(*(use(world, "a") for _ in range(20)))
        assert world.starts == ["a"] and len(set(engines)) == 1 and world.estimates == 1

    in_virtual_time(main())


def test_the_least_recently_used_idle_model_is_unloaded() -> None:
    async def main() -> None:
        world = World()
        world.make(THREE).start()
        for name in ("a", "b", "a", "c"):
            await use(world, name, 0.1)
        assert sorted(each.name for each in world.alive) == ["a", "c"]
        assert world.model("b").counts.unloads["memory"] == 1

    in_virtual_time(main())


def test_a_request_waits_while_all_others_are_busy_and_comes_before_later_ones() -> None:
    async def main() -> None:
        world, order = World(), []
        world.make(THREE).start()

        async def note(name: str, seconds: float) -> None:
            await use(world, name, seconds)
            order.append(name)

        await asyncio.gather(use(world, "a"), use(world, "b"))
        long = [asyncio.ensure_future(note("a", 8.0)), asyncio.ensure_future(note("b", 30.0))]
        await asyncio.sleep(0.1)
        third = asyncio.ensure_future(note("c", 1.0))
        await asyncio.sleep(6.0)  # it has waited too long: the models that it waits for get no new requests
        late = asyncio.ensure_future(note("a", 0.1))
        await asyncio.gather(*long, third, late)
        assert order == ["a", "c", "a", "b"]
        assert world.starts == ["a", "b", "c", "a"]

    in_virtual_time(main())


def test_a_pinned_model_is_loaded_at_the_start_and_stays() -> None:
    async def main() -> None:
        world = World()
        world.make([spec("a", pinned=True), spec("b"), spec("c")], keep_alive=5).start()
        await asyncio.sleep(3.0)
        assert world.starts == ["a"]
        await use(world, "b")
        await use(world, "c")
        await asyncio.sleep(60.0)
        assert [each.name for each in world.alive] == ["a"]
        world.engine("a").kill()
        await asyncio.sleep(5.0)
        assert [each.name for each in world.alive] == ["a"], "it is loaded again without a request"

    in_virtual_time(main())


@pytest.mark.parametrize("sleeps", [True, False])
def test_an_idle_model_sleeps_then_ends_and_a_request_wakes_it(sleeps: bool) -> None:
    async def main() -> None:
        world = World(sleeps=sleeps)
        world.make([spec("a")], keep_alive=10).start()
        first = await use(world, "a")
        await asyncio.sleep(9.0)
        assert world.model("a").slot.state is ModelState.LOADED
        await asyncio.sleep(3.0)
        assert world.model("a").slot.state is (ModelState.SLEEPING if sleeps else ModelState.UNLOADED)
        assert (await use(world, "a") is first) is sleeps
        await asyncio.sleep(40.0)
        assert world.model("a").slot.state is ModelState.UNLOADED and not world.alive

    in_virtual_time(main())


def test_keep_alive_0_ends_a_model_at_once_and_its_own_comes_before_the_servers() -> None:
    async def main() -> None:
        world = World()
        world.make([spec("a", keep_alive=0.0), spec("b", keep_alive=-1.0), spec("c")], keep_alive=3).start()
        await use(world, "a")
        await asyncio.sleep(1.0)
        assert world.model("a").slot.state is ModelState.UNLOADED
        assert world.model("a").counts.sleeps == 0
        await use(world, "b")
        await asyncio.sleep(10_000.0)
        assert world.model("b").slot.state is ModelState.LOADED

    in_virtual_time(main())


def test_a_load_that_fails_gives_its_reason_and_the_next_try_works() -> None:
    async def main() -> None:
        world = World(failure=lambda name: "no such file" if name == "a" and world.starts.count("a") == 1 else "")
        world.make(THREE).start()
        answers = await asyncio.gather(*(use(world, "a") for _ in range(3)), use(world, "b"), return_exceptions=True)
        assert all(isinstance(each, ApiError) and "no such file" in each.message for each in answers[:3])
        assert isinstance(answers[3], FakeEngine)
        with pytest.raises(ApiError, match="no such file") as soon:
            await use(world, "a")
        assert soon.value.headers["Retry-After"] == "1" and world.starts.count("a") == 1, "not tried again at once"
        await asyncio.sleep(2.0)
        assert (await use(world, "a")).name == "a"

    in_virtual_time(main())


def test_a_model_that_never_fits_is_refused_with_the_numbers() -> None:
    async def main() -> None:
        world = World()
        world.make([spec("a", memory=30), spec("b", memory=15, pinned=True), spec("c")]).start()
        await asyncio.sleep(5.0)
        with pytest.raises(ApiError, match="the model 'a' needs 0.00 GiB, and the memory budget is 0.00 GiB") as error:
            await use(world, "a")
        assert error.value.code == "model_too_large"
        with pytest.raises(ApiError, match=r"pinned models have 0.00 GiB \(b\)"):
            await use(world, "c")
        assert world.starts == ["b"]

    in_virtual_time(main())


def test_requests_that_wait_are_bounded_in_number_and_time() -> None:
    async def main() -> None:
        world = World(load_seconds=lambda name: 100.0)
        world.make(THREE, max_waiting_requests=2, max_wait=10).start()
        waiting = [asyncio.ensure_future(use(world, "a")) for _ in range(2)]
        await asyncio.sleep(1.0)
        with pytest.raises(ApiError, match="2 requests wait for models to load") as full:
            await use(world, "b")
        assert full.value.status == 503 and "Retry-After" in full.value.headers
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert ["was not loaded within 10 s" in str(each) for each in answers] == [True, True]
        await asyncio.sleep(120.0)
        assert (await use(world, "a")).name == "a" and world.starts == ["a"], "it went on loading"

    in_virtual_time(main())


def test_a_killed_engine_is_started_by_the_next_request_and_no_other_notices() -> None:
    async def main() -> None:
        world = World()
        world.make(THREE).start()
        other = await use(world, "b")
        running = asyncio.ensure_future(use(world, "a", 5.0))
        await asyncio.sleep(3.0)
        world.engine("a").kill()
        dead = await running
        assert dead.dead
        fresh = await use(world, "a")
        assert fresh is not dead and await use(world, "b") is other
        assert world.starts == ["b", "a", "a"]

    in_virtual_time(main())


def test_an_engine_with_a_background_response_is_not_unloaded() -> None:
    async def main() -> None:
        world = World()
        world.make([spec("a"), spec("b", memory=20)], keep_alive=5).start()
        engine = await use(world, "a")
        engine.busy = True
        waiting = asyncio.ensure_future(use(world, "b"))
        await asyncio.sleep(20.0)
        assert not waiting.done() and engine in world.alive and not engine.asleep
        engine.busy = False
        await waiting
        assert engine not in world.alive

    in_virtual_time(main())


def test_stop_unloads_an_idle_model_and_refuses_a_busy_one() -> None:
    async def main() -> None:
        world = World()
        world.make(THREE).start()
        running = asyncio.ensure_future(use(world, "a", 5.0))
        await asyncio.sleep(3.0)
        with pytest.raises(ApiError, match="has 1 requests") as busy:
            await world.manager.unload(world.model("a"))
        assert busy.value.status == 409
        await running
        await world.manager.unload(world.model("a"))
        assert not world.alive and world.model("a").counts.unloads["admin"] == 1

    in_virtual_time(main())


def test_stop_refuses_a_model_with_a_background_response() -> None:
    async def main() -> None:
        world = World()
        world.make(THREE).start()
        engine = await use(world, "a")
        engine.busy = True
        with pytest.raises(ApiError, match="has 1 requests") as busy:
            await world.manager.unload(world.model("a"))
        assert busy.value.status == 409 and engine in world.alive
        engine.busy = False
        await asyncio.sleep(2.0)
        await world.manager.unload(world.model("a"))
        assert not world.alive

    in_virtual_time(main())


def test_stop_ends_an_engine_that_is_being_put_to_sleep() -> None:
    async def main() -> None:
        world = World()
        world.make([spec("a")], keep_alive=10).start()
        await use(world, "a")
        while world.model("a").slot.state is not ModelState.UNLOADING:
            await asyncio.sleep(0.01)
        await world.manager.unload(world.model("a"))
        assert world.model("a").slot.state is ModelState.UNLOADED and not world.alive

    in_virtual_time(main())


def test_a_model_that_is_planned_loads_while_another_is_downloaded() -> None:
    async def main() -> None:
        world = World(plan_seconds=lambda name: 1000.0 if name == "c" else 0.0)
        world.make(THREE, max_wait=100).start()
        first = asyncio.ensure_future(use(world, "c"))
        await asyncio.sleep(0)
        assert [(await use(world, name)).name for name in "ab"] == ["a", "b"]
        assert not first.done() and world.model("c").slot.size is None
        with pytest.raises(ApiError, match="its memory is being planned, or its files are being downloaded"):
            await first
        await asyncio.sleep(1000.0)
        assert (await use(world, "c")).name == "c" and world.estimates == 1

    in_virtual_time(main())


def test_a_plan_that_breaks_off_fails_the_models_that_it_left_out() -> None:
    async def main() -> None:
        world = World()

        def break_off(name: str) -> float:
            if name == "b" and world.estimates == 1:
                raise OSError("no memory for the process")
            return 0.0

        world.plan_seconds = break_off
        world.make(THREE).start()
        answers = await asyncio.gather(use(world, "a"), use(world, "b"), return_exceptions=True)
        assert isinstance(answers[0], FakeEngine)
        assert "'b' could not be loaded: no memory for the process" in str(answers[1])
        await asyncio.sleep(2.0)
        assert (await use(world, "b")).name == "b" and world.estimates == 2

    in_virtual_time(main())


def test_a_pinned_model_whose_load_fails_is_tried_again() -> None:
    async def main() -> None:
        world = World()
        world.failure = lambda name: "no such file" if len(world.starts) < 4 else ""
        world.make([spec("a", pinned=True)]).start()
        await asyncio.sleep(20.0)
        assert world.starts == ["a"] * 4 and world.model("a").slot.state is ModelState.LOADED

    in_virtual_time(main())


def test_a_pinned_model_that_is_too_large_is_not_tried_again() -> None:
    async def main() -> None:
        world = World()
        world.make([spec("a", memory=30, pinned=True)]).start()
        await asyncio.sleep(1000.0)
        assert world.starts == [] and world.estimates == 1 and not world.manager._tasks

    in_virtual_time(main())


def test_a_pinned_model_that_ends_soon_after_each_load_waits_longer_each_time() -> None:
    async def main() -> None:
        world = World()
        world.make([spec("a", pinned=True)]).start()

        async def restart(seconds: float) -> int:
            """Ends the engine after so many seconds -> seconds until the next one is ready."""
            await asyncio.sleep(seconds)
            world.engine("a").kill()
            killed = asyncio.get_running_loop().time()
            while world.model("a").slot.state is not ModelState.LOADED or not world.alive:
                await asyncio.sleep(0.1)
            return round(asyncio.get_running_loop().time() - killed)

        await asyncio.sleep(3.0)
        assert [await restart(1.0) for _ in range(4)] == [2, 3, 5, 9], "a load takes one second"
        assert await restart(60.0) == 2, "an engine that lasted starts anew"

    in_virtual_time(main())


def test_a_client_that_leaves_while_its_model_loads_frees_its_place() -> None:
    async def main() -> None:
        world = World()
        world.make(THREE).start()
        leaving = asyncio.ensure_future(use(world, "a"))
        await asyncio.sleep(1.0)
        leaving.cancel()
        await asyncio.sleep(5.0)
        slot = world.model("a").slot
        assert (slot.waiting, slot.in_flight, slot.state) == (0, 0, ModelState.LOADED)

    in_virtual_time(main())


def test_a_model_whose_waiting_client_leaves_gives_its_place_in_line_up() -> None:
    async def main() -> None:
        world = World()
        world.make(THREE).start()
        await asyncio.gather(use(world, "a"), use(world, "b"))
        busy = [asyncio.ensure_future(use(world, name, 100.0)) for name in "ab"]
        await asyncio.sleep(0.1)
        leaving = asyncio.ensure_future(use(world, "c"))
        await asyncio.sleep(6.0)
        held = [asyncio.ensure_future(use(world, name)) for name in "ab"]
        await asyncio.sleep(1.0)
        assert [each.done() for each in held].count(False) == 1, "one of them has to go for the third"
        leaving.cancel()
        await asyncio.sleep(0.1)
        assert all(each.done() for each in held) and not any(each.done() for each in busy)
        await asyncio.gather(*busy)

    in_virtual_time(main())


def test_a_client_that_leaves_in_the_moment_of_its_turn_is_not_counted() -> None:
    async def main() -> None:
        world = World()
        manager = world.make(THREE)
        manager.start()
        leaving = asyncio.ensure_future(use(world, "a", 5.0))
        grant = manager._grant

        def and_leave(model: ManagedModel) -> None:
            grant(model)
            leaving.cancel()

        manager._grant = and_leave  # type: ignore[method-assign]
        await asyncio.wait([leaving])
        assert leaving.cancelled() and world.model("a").slot.in_flight == 0

    in_virtual_time(main())


def test_an_engine_that_dies_asleep_takes_no_memory_for_its_end() -> None:
    async def main() -> None:
        world = World()
        world.make([spec("a", keep_alive=20.0), spec("b"), spec("c")]).start()
        await use(world, "a")
        await asyncio.sleep(21.0)
        await asyncio.gather(use(world, "b"), use(world, "c"))
        assert world.model("a").slot.state is ModelState.SLEEPING
        world.engine("a").kill()
        while world.model("a").slot.state is not ModelState.UNLOADED:
            world.check()
            await asyncio.sleep(0.005)

    in_virtual_time(main())


async def _play(seed: int, requests: int) -> list[str]:
    """Random requests, deaths, failures, idle times and clients that leave. The world checks memory at each start."""
    rng = random.Random(seed)
    world = random_world(rng, budget=rng.choice([20, 24, 30]))
    world.failure = lambda name: "out of luck" if rng.random() < 0.05 else ""
    specs: list[ModelSpec] = [spec("a", rng.choice([6, 10])), spec("b", 10), spec("c", rng.choice([10, 14]))]
    world.make(specs, keep_alive=rng.choice([-1, 0, 2, 20]), max_wait=600).start()
    outcomes: list[str] = []

    async def request(name: str) -> None:
        try:
            engine = await use(world, name, rng.choice([0.0, 0.1, 1.0, 7.0]))
            outcomes.append("killed" if engine.dead else "answered")
        except ApiError as error:
            assert error.code == "model_load_failed", error
            outcomes.append("refused")
        except asyncio.CancelledError:
            outcomes.append("left")
            raise

    tasks = []
    for _ in range(requests):
        tasks.append(asyncio.ensure_future(request(rng.choice("aabbc"))))
        if rng.random() < 0.05 and world.alive:
            rng.choice(world.alive).kill()
        if rng.random() < 0.05:
            rng.choice(tasks).cancel()
        await asyncio.sleep(rng.choice([0.0, 0.0, 0.05, 0.5, 4.0]))
        world.check()
    await asyncio.wait(tasks)
    started_none = sum(each.cancelled() for each in tasks)
    assert not [each.exception() for each in tasks if not each.cancelled() and each.exception()]
    assert all((each.slot.in_flight, each.slot.waiting) == (0, 0) for each in world.manager.models)
    await asyncio.sleep(100.0)
    world.check()
    return [*outcomes, *["left"] * started_none]


@pytest.mark.parametrize("seed", range(12))
def test_no_request_is_lost_and_memory_stays_within_the_budget(seed: int) -> None:
    outcomes = in_virtual_time(_play(seed, 150))
    assert len(outcomes) >= 150, "no request is lost"
    assert outcomes.count("answered") > 75


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_no_request_is_lost_in_many_worlds() -> None:
    for seed in range(1000, 3000):
        outcomes = in_virtual_time(_play(seed, 300))
        assert len(outcomes) >= 300 and outcomes.count("answered") > 150, f"world {seed}"
