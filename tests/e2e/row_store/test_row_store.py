"""Prompt embeddings through the row store: equal to the ids whose rows they are, however and how often rows are
written, and in steps that are recorded."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quintet import LLM, SamplingParams
from quintet.engine.client import EngineClient
from quintet.layers.row_store import PAGE_ROWS
from quintet.platforms.cpu.graph import TOKENS_PER_PROOF, Replay
from quintet_tools.checkpoints.tiny import FAMILIES, VOCAB, variant
from tests.e2e.engine.test_embeds import LLAMA, ON, PROMPTS, add, embedded, essence, given, said
from tests.e2e.engine.test_oracle import client
from tests.helpers.platforms import tpu
from tests.helpers.platforms.engines import engine, told
from tests.helpers.platforms.null_engine import drain

LONG = PROMPTS[2]  # 70 tokens
SMALL = {"max_num_batched_tokens": 160, "enable_prefix_caching": False}


class Watched(Replay):
    """The last one that was made is kept."""

    last: "Watched"

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        Watched.last = self


@pytest.mark.parametrize("family", ["llama", "gemma3n_text"])
def test_a_prompt_is_cut_at_any_token(family: str) -> None:
    """Gemma 3n looks up nothing for each layer where there is no id: there is no prompt of ids to compare with."""
    name = next(iter(FAMILIES[family]))
    tiny, made = variant(family, name), client((family, name, "float32", {}), **ON, **SMALL)
    prompt: Any = LONG if family == "llama" else given(tiny, LONG)
    want = essence(said(made, {"whole": prompt}, logprobs=2, max_tokens=2)["whole"])
    limits = made.engine.scheduler.limits
    for border in range(1, len(LONG)):
        add(made, "cut", given(tiny, LONG), logprobs=2, max_tokens=2)
        made.engine.scheduler.limits = replace(limits, max_num_batched_tokens=border)  # type: ignore[misc]
        assert not made.step()
        made.engine.scheduler.limits = limits  # type: ignore[misc]
        assert essence(drain(made)["cut"]) == want, border


@pytest.mark.parametrize("rows", [16, 64, 100])
def test_a_store_that_holds_less_than_a_prompt_serves_all(rows: int) -> None:
    tiny, made = variant("llama", "plain"), client(LLAMA, **ON, encoder_cache_rows=rows, max_num_batched_tokens=50)
    want = said(made, dict(zip("0123", PROMPTS, strict=True)), logprobs=2)
    made.engine.reset_prefix_cache()
    got = said(made, {str(i): given(tiny, p) for i, p in enumerate(PROMPTS)}, logprobs=2)
    assert {name: essence(each) for name, each in got.items()} == {name: essence(each) for name, each in want.items()}
    books = made.engine.scheduler.kv_cache_manager.row_store
    assert books is not None and books.pool.num_used == 0 and books.pool.num_pages == 1 + -(-rows // PAGE_ROWS)


def test_steps_with_embeddings_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a size that comes often enough; the rows are others each time."""
    pytest.importorskip("quintet._cpu", reason="steps are recorded by the compiled extension")
    monkeypatch.setattr("quintet.platforms.cpu.platform.Replay", Watched)
    tiny, made = variant("llama", "plain"), client(LLAMA, **ON, **SMALL)
    count, turns = 2 * TOKENS_PER_PROOF, 6
    ids = [[(7 * at + turn) % VOCAB for at in range(count)] for turn in range(turns)]
    for turn in range(turns):
        both = said(made, {"e": given(tiny, ids[turn])}, max_tokens=1), said(made, {"i": ids[turn]}, max_tokens=1)
        assert essence(both[0]["e"]) == essence(both[1]["i"])
    assert not Watched.last.refused
    sizes = {len(size): graph for size, graph in Watched.last._graphs.items()}
    assert len(sizes) == 2, "with rows of the store, and without"
    assert {graph.replays for graph in sizes.values()} == {turns - 4}, "two, a recording, a proof"


def losing(made: EngineClient, how: str) -> None:
    """The device's memory is lost, or may be."""
    worker = made.engine_plan.ranks.workers[0]
    if how == "reload":
        made.engine.reload_weights(made.engine_plan.folder)
    elif how == "start over":
        made.engine._start_over()
    else:
        made.engine.sleep(int(how[-1]))
        made.wake_up()
    assert worker.row_store is not None
    worker.row_store.rows.data.fill_(torch.nan)


@pytest.mark.parametrize("how", ["sleep 1", "sleep 2", "reload", "start over"])
def test_rows_are_written_again_after(how: str) -> None:
    tiny, made = variant("llama", "plain"), client(LLAMA, **ON)
    first = essence(said(made, {"a": given(tiny, LONG)}, logprobs=2)["a"])
    if how in ("reload", "start over"):  # in the middle of a request
        add(made, "a", given(tiny, LONG), logprobs=2)
        made.step()
    losing(made, how)
    if how not in ("reload", "start over"):
        add(made, "a", given(tiny, LONG), logprobs=2)
    assert essence(drain(made)["a"]) == first


def test_a_prompt_that_no_step_can_hold_is_refused() -> None:
    tiny = variant("llama", "plain")
    made = client(LLAMA, **ON, enable_chunked_prefill=False, encoder_cache_rows=32)
    with pytest.raises(ValueError, match=r"70 embeddings, and the device has room for 32 \(encoder_cache_rows\)"):
        add(made, "a", given(tiny, LONG))
    both = said(made, {"e": given(tiny, LONG[:32]), "i": LONG[:32]})
    assert essence(both["e"]) == essence(both["i"])
    with pytest.raises(ValueError, match="encoder_cache_rows=32: no request brings rows; set enable_prompt_embeds"):
        client(LLAMA, max_model_len=160, num_pages=20, encoder_cache_rows=32)


def test_the_plan_counts_the_store() -> None:
    tiny = variant("llama", "plain")
    plain, made = (client(LLAMA, **{**ON, **more}) for more in ({"enable_prompt_embeds": False}, {}))
    row = 4 * tiny.config.hidden_size
    rows = made.engine_plan.config.step_tokens
    took = [each.engine_plan.memory_plan.model_memory.estimate.weights for each in (plain, made)]
    assert took[1] - took[0] == (rows + PAGE_ROWS) * row
    assert any(f"encoder_cache_rows={rows}: {row} bytes each" in each for each in made.engine_plan.reasons)


@pytest.mark.slow
def test_ranks_that_are_processes_write_the_same_rows() -> None:
    pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")
    tiny = variant("llama", "plain")
    settings: dict[str, Any] = {"enable_prompt_embeds": True, "encoder_cache_rows": 32, "max_num_batched_tokens": 24}
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=2)
    ids, prompts = [{"prompt_token_ids": each[:40]} for each in PROMPTS], [given(tiny, each[:40]) for each in PROMPTS]
    ranks: LLM = engine(tiny, **settings, tensor_parallel_size=2, distributed_executor_backend="mp")
    with ranks:
        want = told(ranks, ids, greedy)
        for _ in range(2):
            assert told(ranks, prompts, greedy) == want


@pytest.mark.slow
@tpu.needs_jax
def test_a_small_store_on_jax() -> None:
    """Rows are written by blocks of compiled sizes, between steps that run; nothing is compiled for a request."""
    tiny = variant("llama", "plain")
    settings = {**ON, "max_num_seqs": 4, "max_num_batched_tokens": 32, "encoder_cache_rows": 80}
    made = client(LLAMA, "tpu", **settings, compilation_cache_dir=tpu.programs().name)
    compiled = tpu.compilations()
    numbers = {str(i): {"prompt_embeds": embedded(tiny, p).roll(1, dims=-1)} for i, p in enumerate(PROMPTS)}
    want = said(client(LLAMA, **settings), numbers)
    for _ in range(2):
        got = said(made, numbers)
        tokens = [{name: list(each.outputs[0].token_ids) for name, each in outputs.items()} for outputs in (got, want)]
        assert tokens[0] == tokens[1]
    assert compiled == []
