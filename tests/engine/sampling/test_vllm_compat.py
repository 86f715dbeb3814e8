"""Logits processors written for vLLM: what its updates come to, whichever way they are applied, and whole runs."""

import sys
import types
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from quintet import LLM, SamplingParams
from quintet.engine.sampling import logits_processors
from quintet.engine.sampling.load_processors import load_processors
from quintet.engine.sampling.logits_processors import batch_update_between
from quintet.engine.sampling.vllm_compat import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)
from tests.helpers.platforms.null_engine import expected, folder, greedy
from tests.helpers.platforms.sampling import VOCAB, HostDevice, request

POOL = [request(str(i), [i], temperature=0) for i in range(9)]
ROWS = st.lists(st.permutations(range(9)).flatmap(lambda p: st.integers(0, 9).map(lambda n: list(p[:n]))), max_size=6)


class Target(LogitsProcessor):
    """vLLM's own example: a request that names a target token says nothing else."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        target = (sampling_params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token must be a token id, not {target!r}")

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.vocab = vllm_config.model_config.get_vocab_size()
        self.most = vllm_config.scheduler_config.max_num_seqs
        self.device, self.targets = device, dict[int, int]()

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.targets, batch_update, lambda params, _, __: (params.extra_args or {}).get("target_token")
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self.targets:
            rows = torch.tensor(list(self.targets), device=self.device)
            ids = torch.tensor(list(self.targets.values()), device=self.device)
            kept = logits[rows, ids].clone()
            logits[rows] = float("-inf")
            logits[rows, ids] = kept
        return logits


class Bare:
    """Has no base class; keeps what it is told in a list of rows, and knows the requests by their prompts."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: list[Any] = [None] * 20

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows[row] = None
        for row, _, prompt, output in batch_update.added:
            self.rows[row] = prompt, output
        for first, second, how in batch_update.moved:
            moved, there = self.rows[first], self.rows[second]
            self.rows[second] = moved
            self.rows[first] = there if how == MoveDirectionality.SWAP else None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


class AddingFirst(Bare):
    """As vLLM's own processors do it."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            for row, _, prompt, output in batch_update.added:
                self.rows[row] = prompt, output
            super().update_state(BatchUpdate(batch_update.batch_size, batch_update.removed, [], batch_update.moved))


def made(theirs: type, **config: Any) -> Any:
    from quintet import EngineConfig

    (ours,) = load_processors([theirs])
    return ours.make(VOCAB, HostDevice(), EngineConfig(model="bundled", max_model_len=64, **config))


@pytest.mark.parametrize("theirs", [Bare, AddingFirst])
@hypothesis.settings(derandomize=True, max_examples=150, deadline=None)
@hypothesis.given(ROWS)
def test_applying_the_updates_gives_the_rows(theirs: type, steps: list[list[int]]) -> None:
    adapted, before = made(theirs), []
    for step in steps:
        after = [POOL[i] for i in step]
        adapted.update(batch_update_between(before, after) if after != before else None)
        held = [None if kept is None else kept[0][0] for kept in adapted._processor.rows]
        assert held == [*step, *[None] * (20 - len(step))]
        before = after


def test_outputs_grow_in_the_list_that_was_given() -> None:
    adapted, row = made(Bare), request("1", [5, 6], temperature=0)
    adapted.update(batch_update_between([], [row]))
    prompt, output = adapted._processor.rows[0]
    row.append_sampled(7)
    adapted.update(None)
    row.append_sampled(8)
    adapted.update(None)
    assert (prompt, output) == ([5, 6], [7, 8]) and type(output) is list


def test_where_vllm_is_there_its_own_directions_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = types.SimpleNamespace(MoveDirectionality=types.SimpleNamespace(SWAP="swap", UNIDIRECTIONAL="one way"))
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.logits_processor.interface", theirs)  # type: ignore[arg-type]
    seen: list[BatchUpdate] = []
    adapted = made(Bare)
    monkeypatch.setattr(adapted._processor, "update_state", seen.append)
    adapted.update(batch_update_between([], POOL[:3]))
    adapted.update(batch_update_between(POOL[:3], [POOL[1], POOL[0]]))
    assert seen[-1].moved == [(1, 0, "swap")] and list(seen[-1].removed) == [2]


def llm(*processors: Any, **settings: Any) -> LLM:
    return LLM(
        str(folder()), device="null", load_format="dummy", skip_tokenizer_init=True, use_tqdm=False,
        logits_processors=processors, max_num_seqs=4, **settings,
    )  # fmt: skip


def said(engine: LLM, prompts: list[list[int]], *params: SamplingParams) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in engine.generate(prompts, list(params), use_tqdm=False)]


def test_vllms_example_runs_as_it_is() -> None:
    params = [greedy(max_tokens=3 + i, extra_args={"target_token": i} if i % 2 else None) for i in range(10)]
    found = said(llm(Target), [[i] for i in range(10)], *params)
    assert found == [[i] * (3 + i) if i % 2 else expected([i], 3 + i) for i in range(10)]


def test_it_is_found_by_its_name_and_refuses_its_parameters() -> None:
    engine = llm(f"{__name__}:Target")
    with pytest.raises(ValueError, match="target_token must be a token id, not 'x'"):
        said(engine, [[1]], greedy(extra_args={"target_token": "x"}))


class Echo(AdapterLogitsProcessor):
    """One function per request, of two arguments or of three."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        asked = (params.extra_args or {}).get("echo")
        if asked is None:
            return None

        def only(logits: torch.Tensor, token: int) -> torch.Tensor:
            return torch.full_like(logits, float("-inf")).index_fill_(0, torch.tensor([token]), 0.0)

        if asked == "count":
            return lambda output, logits: only(logits, len(output))
        return lambda prompt, output, logits: only(logits, prompt[len(output)])


def test_functions_per_request_run_too_and_a_failing_one_ends_its_request_alone() -> None:
    engine = llm(Echo)
    prompts = [[7, 8, 9], [7, 8, 9], [1]]
    params = [greedy(max_tokens=3, extra_args=args) for args in ({"echo": "count"}, {"echo": "prompt"}, None)]
    assert said(engine, prompts, *params) == [[0, 1, 2], [7, 8, 9], expected([1], 3)]
    outputs = engine.generate([[7], [1]], [greedy(extra_args={"echo": "prompt"}), greedy()], use_tqdm=False)
    assert (outputs[0].outputs[0].finish_reason, list(outputs[1].outputs[0].token_ids)) == ("error", expected([1], 8))
    assert "Echo failed: IndexError" in str(outputs[0].outputs[0].error)


class Curious(Bare):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.size = vllm_config.parallel_config.tensor_parallel_size


def test_what_the_configuration_lacks_is_said() -> None:
    with pytest.raises(AttributeError, match="read parallel_config of the engine; use model_config, scheduler_config"):
        made(Curious)


def test_a_class_that_lacks_a_method_is_refused() -> None:
    half = type("Half", (), {"update_state": lambda self, update: None, "apply": lambda self, logits: logits})
    with pytest.raises(ValueError, match="does not define is_argmax_invariant"):
        load_processors([half])
    assert not issubclass(LogitsProcessor, logits_processors.LogitsProcessor)
