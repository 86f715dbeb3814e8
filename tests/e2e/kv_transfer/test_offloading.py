"""Pages in host memory and on a disk: greedy tokens with them equal those without, in every form that a cache has."""

import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quintet import LLM
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.engine.engine import Engine
from quintet.engine.kv_transfer.offload.tiers import TieredConnector
from quintet.engine.request import CoreRequest
from quintet.engine.startup import launch, prepare
from quintet.interface.platform import Capabilities
from quintet.platforms import SelectedPlatform
from quintet_tools.checkpoints.encoders import encoder
from quintet_tools.checkpoints.tiny import FAMILIES, PLAIN, Tiny, make, variant
from tests.e2e.engine.test_windows import GREEDY, MODELS, prompt, tokens
from tests.helpers.platforms.loopback import LoopbackPlatform

LENGTH, FEW = 200, 60  # tokens of a prompt; pages, of which one request's takes thirteen in each group

PAGES = {"mistral": 24, "gemma3_text": 110, "gemma3n_text": 120}  # of those whose groups need more or fewer

FORMS: dict[str, tuple[Tiny, dict[str, Any]]] = {
    "llama": (make("llama", {**PLAIN, "max_position_embeddings": 512}), {}),
    "llama, int8": (make("llama", {**PLAIN, "max_position_embeddings": 512}), {"kv_cache_dtype": "int8"}),
    "llama, int4": (make("llama", {**PLAIN, "max_position_embeddings": 512}), {"kv_cache_dtype": "int4"}),
    "llama, fp8": (make("llama", {**PLAIN, "max_position_embeddings": 512}), {"kv_cache_dtype": "fp8"}),
    "llama, computed scales": (
        make("llama", {**PLAIN, "max_position_embeddings": 512}),
        {"kv_cache_dtype": "fp8", "calculate_kv_scales": True},
    ),
    "llama, bfloat16": (make("llama", {**PLAIN, "max_position_embeddings": 512}), {"dtype": "bfloat16"}),
    "llama, odd pages": (make("llama", {**PLAIN, "max_position_embeddings": 512}), {"page_size": 4, "num_pages": 200}),
    **{
        family: (make(family, {**settings, "max_position_embeddings": 512}), {"num_pages": PAGES.get(family, 80)})
        for family, settings in MODELS.items()
    },
    "deepseek_v3": (make("deepseek_v3", {**FAMILIES["deepseek_v3"]["plain"], "max_position_embeddings": 512}), {}),
}


def served(tiny: Tiny, **settings: Any) -> EngineClient:
    more = {
        "max_num_batched_tokens": 64,
        "max_model_len": LENGTH + 32,
        "num_pages": FEW,
        "dtype": "float32",
        **settings,
    }
    return EngineClient(
        EngineConfig.from_kwargs(model=str(tiny.folder), device="cpu", skip_tokenizer_init=True, **more), progress=False
    )


def tiers(client: EngineClient) -> TieredConnector:
    assert client.engine.scheduler.kv_transfer is not None
    connector = client.engine.scheduler.kv_transfer.connector
    assert isinstance(connector, TieredConnector)
    return connector


def asked(count: int = 8) -> dict[str, list[int]]:
    """More than the cache has room for."""
    return {str(at): prompt(at, LENGTH) for at in range(count)}


@pytest.mark.grid(cases=4)
@pytest.mark.parametrize("form", FORMS)
def test_what_comes_back_is_what_was_computed(form: str, tmp_path: Path) -> None:
    """From host memory, and in another process' place from the disk."""
    tiny, settings = FORMS[form]
    wanted = tokens(served(tiny, **settings), **asked())
    more = {**settings, "kv_offloading_size": "64M", "kv_offloading_folder": str(tmp_path / "pages")}
    client = served(tiny, **more)
    assert tokens(client, **asked()) == wanted
    computed = client.engine.stats().steps.num_prompt_tokens
    assert tokens(client, **asked()) == wanted
    stats = client.engine.stats()
    assert stats.steps.num_prompt_tokens - computed <= 8 * 16 and stats.scheduler.external_hits > 4 * LENGTH
    assert stats.kv_connector.pages_failed == 0 and stats.kv_connector.pages_loaded > 0
    client.close()
    other = served(tiny, **more)
    assert other.engine.stats().steps.num_prompt_tokens == 0, "the prompt for scales is not counted"
    assert tokens(other, **asked()) == wanted
    stats = other.engine.stats()
    assert stats.steps.num_prompt_tokens <= 8 * 16 and stats.kv_connector.pages_failed == 0
    assert tiers(other).counts()["disk_loaded"] == stats.kv_connector.pages_loaded
    other.close()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_memory_and_folder_never_hold_more_than_they_may(policy: str, tmp_path: Path) -> None:
    tiny = FORMS["llama"][0]
    wanted = tokens(served(tiny), **asked(12))
    page = tiers(served(tiny, kv_offloading_size=1)).host._rows.shape[1] * 4
    size, disk = 30 * page, 50 * (page + 128)
    client = served(
        tiny, kv_offloading_size=size / 2**30, kv_offloading_folder=str(tmp_path), kv_offloading_policy=policy,
        kv_offloading_folder_size=disk / 2**30,
    )  # fmt: skip
    for _ in range(3):
        assert tokens(client, **asked(12)) == wanted
        there = tiers(client)
        assert len(there.host) <= 30 == there.host.capacity and there.host._rows.nbytes <= size
        assert sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file()) <= disk
    client.close()
    assert there.disk is not None and 0 < len(there.disk) <= 50
    assert len(list(tmp_path.rglob("*.page"))) == len(there.disk)


def test_damaged_files_are_computed_again_and_go(tmp_path: Path) -> None:
    tiny = FORMS["llama"][0]
    more = {"kv_offloading_size": "64M", "kv_offloading_folder": str(tmp_path)}
    client = served(tiny, **more)
    wanted = tokens(client, **asked(3))
    client.close()
    files = sorted(tmp_path.rglob("*.page"))
    for at, file in enumerate(files[::2]):
        content = bytearray(file.read_bytes())
        if at % 3 == 0:
            content[len(content) // 2] ^= 1
        elif at % 3 == 1:
            content[:100] = files[1].read_bytes()[:100]  # another page's header
        else:
            content[20] ^= 1  # the version
        file.write_bytes(content)
    other = served(tiny, **more)
    assert tokens(other, **asked(3)) == wanted
    assert other.engine.stats().kv_connector.pages_failed > 0 and other.engine.stats().kv_connector.pages_loaded > 0
    other.close()
    third = served(tiny, **more)
    assert tokens(third, **asked(3)) == wanted and third.engine.stats().kv_connector.pages_failed < len(files) // 2
    third.close()


def test_a_failed_page_ends_its_request_if_that_was_asked_for(tmp_path: Path) -> None:
    tiny = FORMS["llama"][0]
    more = {"kv_offloading_size": "64M", "kv_offloading_folder": str(tmp_path), "kv_load_failure_policy": "fail"}
    client = served(tiny, **more)
    tokens(client, **asked(1))
    client.close()
    for file in tmp_path.rglob("*.page"):
        file.write_bytes(file.read_bytes()[:-1] + b"\x77")
    other = served(tiny, **more)
    other.add("a", Prompt(prompt(0, LENGTH)), GREEDY)
    (output,) = [each for each in _all(other) if each.finished]
    assert output.outputs[0].finish_reason == "error" and "is damaged" in (output.outputs[0].error or "")
    other.close()


def _all(client: EngineClient) -> list[Any]:
    outputs = []
    while client.busy:
        outputs += client.step()
    return outputs


def test_what_a_crash_left_is_swept_away(tmp_path: Path) -> None:
    tiny = FORMS["llama"][0]
    more = {"kv_offloading_size": "64M", "kv_offloading_folder": str(tmp_path)}
    client = served(tiny, **more)
    wanted = tokens(client, **asked(2))
    client.close()
    files = sorted(tmp_path.rglob("*.page"))
    (files[0].parent / "tmpabc.part").write_bytes(b"half a page")
    files[1].write_bytes(files[1].read_bytes()[:100])
    (files[2].parent / "not hex.page").write_bytes(b"")
    other = served(tiny, **more)
    assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob("not*"))
    assert tokens(other, **asked(2)) == wanted
    other.close()
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600 and stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700


def test_another_model_of_the_same_shapes_finds_nothing(tmp_path: Path) -> None:
    """Other weights, another type, another form of the cache: nothing is found, and nobody's tokens change."""
    ours = FORMS["llama"][0]
    folder = tmp_path / "other"
    shutil.copytree(ours.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(each for each in tensors if "k_proj" in each)
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, folder / "model.safetensors")
    more = {"kv_offloading_size": "64M", "kv_offloading_folder": str(tmp_path / "pages")}
    first = served(ours, **more)
    tokens(first, **asked(2))
    first.close()
    config = EngineConfig.from_kwargs(
        model=str(folder), device="cpu", skip_tokenizer_init=True, num_pages=FEW, max_model_len=LENGTH + 32,
        dtype="float32", **more,
    )  # fmt: skip
    other = EngineClient(config, progress=False)
    alone = EngineClient(config.replace(kv_offloading_size=None, kv_offloading_folder=None), progress=False)
    assert tokens(other, **asked(2)) == tokens(alone, **asked(2))
    assert other.engine.stats().scheduler.external_hits == 0
    other.close()
    for settings in ({"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"page_size": 8}):
        third = served(ours, **{**more, **settings})
        tokens(third, **asked(2))
        assert third.engine.stats().scheduler.external_hits == 0, settings
        third.close()


def test_nothing_is_found_of_before_a_reload_a_sleep_or_a_reset(tmp_path: Path) -> None:
    ours, theirs = FORMS["llama"][0], make("llama", {**PLAIN, "max_position_embeddings": 512}, seed=5)
    more = {"kv_offloading_size": "64M", "kv_offloading_folder": str(tmp_path)}
    client = served(ours, **more)
    wanted = tokens(client, **asked(2))
    client.reload_weights(str(theirs.folder))
    assert tokens(client, **asked(2)) == tokens(served(theirs), **asked(2))
    assert client.engine.stats().scheduler.external_hits == 0
    client.reload_weights(str(ours.folder))
    client.engine.sleep(1)
    client.engine.wake_up()
    assert tokens(client, **asked(2)) == wanted and client.engine.stats().scheduler.external_hits == 0
    client.engine.reset_prefix_cache()
    assert tokens(client, **asked(2)) == wanted and client.engine.stats().scheduler.external_hits == 0
    client.close()
    later = served(ours, **more)
    later.engine.reset_prefix_cache()
    assert tokens(later, **asked(2)) == wanted and later.engine.stats().scheduler.external_hits == 0
    later.close()


def test_a_folder_is_one_engines_at_a_time(tmp_path: Path) -> None:
    tiny = FORMS["llama"][0]
    more = {"kv_offloading_size": "64M", "kv_offloading_folder": str(tmp_path)}
    client = served(tiny, **more)
    with pytest.raises(ValueError, match="is another engine's while that runs; give each engine its own"):
        served(tiny, **more)
    client.close()
    served(tiny, **more).close()
    client = served(tiny, **more)
    del client  # who forgets to close it lets go as well


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    with pytest.raises(ValueError, match="kv_offloading_folder: .* can be written to by others"):
        served(FORMS["llama"][0], kv_offloading_size="64M", kv_offloading_folder=str(tmp_path))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kv_offloading_size": 0}, "kv_offloading_size must be over 0"),
    ({"kv_offloading_size": "4 kilo"}, "kv_offloading_size must be a whole number"),
    ({"kv_offloading_size": 10**6}, "GiB of host memory are free; lower it"),
    ({"kv_offloading_size": "1K"}, "a page takes .* MiB, and none fits; raise it"),
    ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "enable_prefix_caching is off"),
    ({"kv_offloading_folder": "/tmp/x"}, "give kv_offloading_size, too"),
    ({"kv_offloading_size": 1, "kv_offloading_backend": "mooncake"}, "must be one of native, lmcache"),
    ({"kv_offloading_lmcache": {"local_cpu": True}}, "is for kv_offloading_backend='lmcache'; give that, too"),
    ({"kv_offloading_backend": "lmcache", "kv_offloading_folder": "x"}, "LMCache's folder is its local_disk"),
    ({"kv_offloading_backend": "lmcache", "kv_offloading_policy": "arc"}, "LMCache's is its cache_policy"),
    ({"kv_offloading_backend": "lmcache", "tensor_parallel_size": 2}, "do not agree on that yet; take native"),
    ({"kv_offloading_backend": "lmcache", "enable_prefix_caching": False}, "enable_prefix_caching is off"),
    ({"kv_offloading_size": 1, "kv_offloading_policy": "fifo"}, "must be one of lru, arc"),
    ({"kv_load_failure_policy": "retry"}, "must be one of recompute, fail"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=str)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        served(FORMS["llama"][0], **settings)


def test_without_lmcache_no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache", None)
    config = EngineConfig.from_kwargs(
        model=str(FORMS["llama"][0].folder), device="cpu", skip_tokenizer_init=True, kv_offloading_backend="lmcache"
    )
    with pytest.raises(ValueError, match=r"needs LMCache \(it is not installed\); pip install '.*\[lmcache\]'"):
        prepare(config)


@pytest.mark.parametrize(("family", "message"), [("mamba", "keep a state per request"), ("bert", "keeps nothing")])
def test_models_without_pages_of_their_own_are_refused(family: str, message: str) -> None:
    tiny = encoder("bert", "plain") if family == "bert" else variant(family, "plain")
    config = EngineConfig.from_kwargs(
        model=str(tiny.folder), device="cpu", skip_tokenizer_init=True, kv_offloading_size=1
    )
    with pytest.raises(ValueError, match=f"kv_offloading_size: .*{message}.*leave it out"):
        prepare(config)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_that_are_processes_have_their_parts_in_host_memory(sizes: dict[str, int]) -> None:
    """All know the same pages at the same step, or they would not plan alike, and the engine would end."""
    pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")
    tiny, prompts = FORMS["llama"][0], {f"p{seed}": prompt(seed, LENGTH) for seed in range(4)}
    with LLM(
        str(tiny.folder), device="cpu", skip_tokenizer_init=True, num_pages=20, max_model_len=LENGTH + 32,
        dtype="float32", kv_offloading_size="4M", use_tqdm=False, **sizes,
    ) as llm:  # fmt: skip
        ids = [{"prompt_token_ids": each} for each in prompts.values()]
        first, again = (
            [list(each.outputs[0].token_ids) for each in llm.generate(ids, GREEDY, use_tqdm=False)] for _ in range(2)
        )
        told = llm._client.engine.stats()
    assert first == again == list(tokens(served(tiny), **prompts).values())
    assert told.kv_connector.pages_loaded > 24 and told.kv_connector.pages_failed == 0


def of_ranks(family: str = "llama", **more: Any) -> LLM:
    """Few pages, of ranks that are processes."""
    pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")
    return LLM(
        str(FORMS[family][0].folder), skip_tokenizer_init=True, max_model_len=LENGTH + 32, use_tqdm=False,
        **{"device": "cpu", "dtype": "float32", "num_pages": 20, "tensor_parallel_size": 2, **more},
    )  # fmt: skip


def said_by(llm: LLM, prompts: dict[str, list[int]]) -> list[list[int]]:
    ids = [{"prompt_token_ids": each} for each in prompts.values()]
    return [list(each.outputs[0].token_ids) for each in llm.generate(ids, GREEDY, use_tqdm=False)]


@pytest.mark.slow
def test_ranks_that_are_processes_find_their_parts_on_disks_and_miss_for_all_what_one_misses(tmp_path: Path) -> None:
    """One rank's files are damaged, or gone: all compute those pages, and say the same."""
    prompts = asked(3)
    wanted = list(tokens(served(FORMS["llama"][0]), **prompts).values())
    more = {"kv_offloading_size": "1M", "kv_offloading_folder": str(tmp_path / "pages")}
    with of_ranks(**more) as llm:
        assert said_by(llm, prompts) == wanted
    parts = [sorted((tmp_path / "pages" / f"rank-{rank}").rglob("*.page")) for rank in range(2)]
    assert len(parts[0]) == len(parts[1]) >= 3 * (LENGTH // 16)
    with of_ranks(**more) as llm:
        assert said_by(llm, prompts) == wanted
        told = llm._client.engine.stats()
        assert told.scheduler.external_hits == 3 * (LENGTH // 16) * 16 and told.kv_connector.pages_failed == 0
    for at, file in enumerate(parts[1]):
        if at % 3 == 0:
            file.unlink()
        elif at % 3 == 1:
            file.write_bytes(file.read_bytes()[:-1] + b"\x77")
    with of_ranks(**more) as llm:
        assert said_by(llm, prompts) == wanted
        told = llm._client.engine.stats()
        assert told.scheduler.external_hits < 3 * LENGTH and 0 < told.kv_connector.pages_failed < len(parts[1])
        assert said_by(llm, prompts) == wanted, "they were written anew, or are in host memory"


@pytest.mark.slow
def test_a_page_that_fails_on_one_rank_ends_its_request_on_all_if_that_was_asked_for(tmp_path: Path) -> None:
    more = {"kv_offloading_size": "1M", "kv_offloading_folder": str(tmp_path), "kv_load_failure_policy": "fail"}
    with of_ranks(**more) as llm:
        said_by(llm, asked(1))
    for file in (tmp_path / "rank-1").rglob("*.page"):
        file.write_bytes(file.read_bytes()[:-1] + b"\x77")
    with of_ranks(**more) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt(0, LENGTH)}], GREEDY, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        assert "rank 1 of 2" in (output.outputs[0].error or "") and "is damaged" in (output.outputs[0].error or "")
        assert said_by(llm, {"b": prompt(1, LENGTH)}) == list(
            tokens(served(FORMS["llama"][0]), b=prompt(1, LENGTH)).values()
        )


@pytest.mark.slow
def test_stages_find_their_parts_on_disks(tmp_path: Path) -> None:
    more = {"kv_offloading_size": "1M", "kv_offloading_folder": str(tmp_path)}
    stages = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    wanted = list(tokens(served(FORMS["llama"][0]), **asked(4)).values())
    for turn in range(2):
        with of_ranks(**more, **stages) as llm:
            assert said_by(llm, asked(4)) == wanted == said_by(llm, asked(4))
            told = llm._client.engine.stats()
            assert told.kv_connector.pages_failed == 0
            assert told.scheduler.external_hits > (3 * LENGTH if turn else LENGTH)


def test_pages_of_several_ranks_are_one() -> None:
    """Heads are cut over two ranks: a page elsewhere holds the parts of both."""
    said = []
    for more in ({}, {"kv_offloading_size": "64M"}):
        config = EngineConfig.from_kwargs(
            model=str(FORMS["llama"][0].folder), device="cpu", skip_tokenizer_init=True, tensor_parallel_size=2,
            num_pages=20, max_model_len=LENGTH + 32, dtype="float32", **more,
        )  # fmt: skip
        facts = LoopbackPlatform.probe()
        assert isinstance(facts, Capabilities)
        prepared = prepare(config, SelectedPlatform(LoopbackPlatform, facts, "for a test"))
        engine = launch(prepared, progress=False)
        turns = [_run(engine, asked(3)) for _ in range(2)]
        assert turns[0] == turns[1]
        said.append(turns)
        prepared.ranks.close()
    assert said[0] == said[1] and engine.stats().scheduler.external_hits > LENGTH


def _run(engine: Engine, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {name: [] for name in prompts}
    for name, ids in prompts.items():
        engine.add(CoreRequest(name, ids, GREEDY, (0, 0), 6))
    while engine.busy:
        for delta in engine.step():
            said[delta.request_id] += delta.token_ids
        engine.check_integrity()
    return said
