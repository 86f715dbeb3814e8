"""Sleep on the null platform, and on any other as LLM shows it: what is refused, what is forgotten, what comes back."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quintet import LLM, AsyncLLM
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.engine.sleep import release_kv_cache_memory
from quintet.platforms.null.platform import TOTAL, NullDevice
from quintet_tools.checkpoints.tiny import variant
from tests.helpers.platforms.null_engine import Gate, complete, expected, folder, greedy, null_client, until

PROMPT = list(range(40))


@pytest.mark.parametrize("level", [1, 2])
def test_awake_again_it_gives_the_same_tokens_and_has_forgotten_beginnings(level: int) -> None:
    client = null_client()
    complete(client, PROMPT, greedy())
    pages = client.engine_plan.memory_plan.kv_bytes
    used = TOTAL - client.engine_plan.ranks.workers[0].device.memory().free
    assert client.engine.sleep(level) == pages == used
    assert client.engine.asleep == level and client.engine_plan.ranks.workers[0].device.memory().free == TOTAL
    client.wake_up()
    before = client.engine.stats().steps.num_prompt_tokens
    assert list(complete(client, PROMPT, greedy()).outputs[0].token_ids) == expected(PROMPT, 8)
    assert client.engine.stats().steps.num_prompt_tokens == before + 40, "nothing was found in the prefix cache"
    assert TOTAL - client.engine_plan.ranks.workers[0].device.memory().free == pages


def test_it_does_not_sleep_over_requests() -> None:
    client = null_client()
    client.add("a", Prompt(PROMPT), greedy(max_tokens=50))
    client.add("b", Prompt(PROMPT), greedy(max_tokens=50))
    client.step()
    with pytest.raises(ValueError, match="the engine has 2 requests; let them finish, or abort them, before it sleeps"):
        client.engine.sleep()
    client.abort(["a", "b"])
    assert client.engine.sleep() > 0


def test_asleep_it_takes_nothing_and_forgets_who_asked() -> None:
    client = null_client()
    client.engine.sleep()
    with pytest.raises(ValueError, match=r"asleep \(level 1\) and takes no requests; call wake_up\(\) first"):
        client.add("a", Prompt(PROMPT), greedy())
    client.wake_up()
    client.add("a", Prompt(PROMPT), greedy())
    assert client.abort(["a"])[0].finished


def test_levels_and_tags_are_checked() -> None:
    client = null_client()
    for level in (0, 3):
        with pytest.raises(ValueError, match=f"level must be 1 .* or 2 .*, not {level}"):
            client.engine.sleep(level)
    client.engine.sleep(1)
    assert client.engine.sleep(1) == 0, "it sleeps already"
    with pytest.raises(ValueError, match="sleeps at level 1; wake it up before it sleeps at level 2"):
        client.engine.sleep(2)
    with pytest.raises(ValueError, match=r"tags=\['kv_cache'\], and the weights sleep; wake them before the cache"):
        client.wake_up(["kv_cache"])
    client.wake_up(["weights"])
    with pytest.raises(ValueError, match="asleep"):
        client.add("a", Prompt(PROMPT), greedy())
    with pytest.raises(ValueError, match="unknown tag 'kvcache'; did you mean 'kv_cache'"):
        client.wake_up(["kvcache"])
    assert client.engine.asleep == 1
    client.wake_up(["kv_cache", "weights"])
    client.wake_up()
    assert client.engine.asleep == 0


def test_a_device_that_cannot_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    client = null_client()
    monkeypatch.delattr(NullDevice, "sleep")
    with pytest.raises(NotImplementedError, match="NullDevice cannot sleep"):
        client.engine.sleep()
    assert client.engine.asleep == 0
    assert list(complete(client, PROMPT, greedy()).outputs[0].token_ids) == expected(PROMPT, 8)


def test_falling_asleep_is_undone_if_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    client = null_client()

    def fail(self: NullDevice, level: int) -> int:
        raise MemoryError("the host has no room for the weights")

    monkeypatch.setattr(NullDevice, "sleep", fail)
    with pytest.raises(MemoryError, match="no room"):
        client.engine.sleep()
    assert list(complete(client, PROMPT, greedy()).outputs[0].token_ids) == expected(PROMPT, 8)


def test_waking_that_fails_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    client = null_client()
    client.engine.sleep(2)
    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="somebody else"):

        def fail(self: NullDevice, *_: Any) -> Any:
            raise MemoryError("somebody else took the memory")

        patch.setattr(NullDevice, "allocate", fail)
        client.wake_up()
    assert client.engine.asleep == 2
    client.wake_up()
    assert list(complete(client, PROMPT, greedy()).outputs[0].token_ids) == expected(PROMPT, 8)


def test_an_async_engine_sleeps_between_its_requests() -> None:
    engine = AsyncLLM(str(folder()), device="null", load_format="dummy", skip_tokenizer_init=True)

    async def tokens() -> list[int]:
        async for output in engine.generate(PROMPT, greedy()):
            last = output
        return list(last.outputs[0].token_ids)

    async def main() -> None:
        outputs, gate = engine.generate(PROMPT, greedy(max_tokens=300)), Gate(engine, until_output=True)
        await anext(outputs)
        asked = asyncio.ensure_future(engine.sleep())
        await until(lambda: engine._calls.qsize() or asked.done())  # done: before the step that the gate holds
        gate.opened.set()
        with pytest.raises(ValueError, match="has 1 requests"):
            await asked
        await outputs.aclose()
        await engine.sleep(2)
        assert await engine.is_sleeping()
        with pytest.raises(ValueError, match="asleep"):
            await tokens()
        with pytest.raises(ValueError, match="wake them before the cache"):
            await engine.wake_up(["kv_cache"])
        await engine.wake_up(["weights"])
        assert await engine.is_sleeping()
        await engine.wake_up(["kv_cache"])
        assert not await engine.is_sleeping() and await tokens() == expected(PROMPT, 8)

    asyncio.run(main())
    engine.shutdown()


def test_after_level_two_the_weights_are_those_of_the_folder_as_it_is_now(tmp_path: Path) -> None:
    model, settings = tmp_path / "model", {"max_model_len": 64, "num_pages": 40, "dtype": "float32"}
    shutil.copytree(variant("llama", "plain").folder, model)

    def client() -> EngineClient:
        config = EngineConfig.from_kwargs(model=str(model), device="cpu", skip_tokenizer_init=True, **settings)
        return EngineClient(config, progress=False)

    def tokens(client: EngineClient) -> list[int]:
        return list(complete(client, PROMPT, greedy(max_tokens=16)).outputs[0].token_ids)

    first = client()
    before = tokens(first)
    first.engine.sleep(2)
    file = model / "model.safetensors"
    trained = {name: tensor.flip(0).contiguous() for name, tensor in load_file(file).items()}
    file.unlink()
    save_file(trained, file)
    first.wake_up()
    assert tokens(first) == tokens(client()) != before


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_the_bundled_model_wakes_as_it_was(level: int, eager: bool) -> None:
    llm = LLM("bundled", device="cpu", use_tqdm=False, kv_cache_memory_bytes="8M", enforce_eager=eager)
    prompts = ["Once upon a time", "One day, a", "The"]
    params = greedy(detokenize=True, max_tokens=24)

    def text() -> list[str]:
        return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]

    before = text()
    llm.sleep(level)
    assert llm.is_sleeping()
    worker = llm._client.engine_plan.ranks.workers[0]
    assert any(each.numel() for each in worker.model.parameters()) == (level == 1)
    with pytest.raises(ValueError, match="asleep"):
        llm.generate(prompts, params, use_tqdm=False)
    llm.wake_up()
    assert not llm.is_sleeping() and text() == before


def test_the_memory_of_the_cache_alone_is_given_back() -> None:
    client = null_client()
    complete(client, PROMPT, greedy())
    release_kv_cache_memory(client.engine)
    assert client.engine_plan.ranks.workers[0].device.memory().free == TOTAL, "null has pages alone"
    with pytest.raises(ValueError, match="takes no requests"):
        client.add("a", Prompt(PROMPT), greedy())
    client.wake_up(["kv_cache"])
    assert list(complete(client, PROMPT, greedy()).outputs[0].token_ids) == expected(PROMPT, 8)
    client.add("b", Prompt(PROMPT), greedy(max_tokens=50))
    client.step()
    with pytest.raises(ValueError, match="1 requests"):
        release_kv_cache_memory(client.engine)
