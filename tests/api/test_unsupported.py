"""Names that people bring from vLLM: refused with what to do instead, and what is there is shown by help()."""

import asyncio
import inspect
import pydoc
from typing import Any

import pytest

import quintet
from quintet import LLM, AsyncLLM, BeamSearchParams, EngineConfig, SamplingParams, StructuredOutputsParams
from quintet.config.schema.fields import setting_fields
from quintet.config.schema.unsupported import ARGUMENTS, METHODS, NAMES, PARAMETERS
from tests.helpers.platforms.null_engine import expected, folder, greedy

SETTINGS: dict[str, Any] = {"device": "null", "load_format": "dummy", "skip_tokenizer_init": True, "use_tqdm": False}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(folder()), **SETTINGS)


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_vllm_are_refused_with_the_reason(llm: LLM, name: str) -> None:
    with pytest.raises(AttributeError, match=f"LLM.{name} is not there: "):
        getattr(llm, name)
    assert not hasattr(llm, name)


def test_a_misspelt_method_names_the_nearest(llm: LLM) -> None:
    with pytest.raises(AttributeError, match="LLM has no attribute 'generates'; did you mean 'generate'"):
        llm.generates  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_vllm_are_refused_with_the_reason_unless_they_ask_for_nothing(llm: LLM, name: str) -> None:
    given: dict[str, Any] = {name: "something"}
    calls = (
        lambda: llm.generate([[1]], greedy(), **given),
        lambda: llm.stream([[1]], greedy(), **given),
        lambda: llm.chat([], greedy(), **given),
        lambda: llm.beam_search([[1]], BeamSearchParams(), **given),
        lambda: AsyncLLM.generate(llm, [1], greedy(), **given),  # type: ignore[arg-type]
    )
    for call in calls:
        with pytest.raises(ValueError, match=rf"LLM.\w+\({name}=...\) is not there: "):
            call()
    (output,) = llm.generate([[1]], greedy(), use_tqdm=False, **{name: None})
    assert output.outputs[0].token_ids == expected([1], 8)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_module_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ImportError, match=f"quintet.{name} is not there: "):
        getattr(quintet, name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_sampling_parameters_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=f"sampling parameter '{name}' is not there: "):
        SamplingParams(**{name: None})


def test_prompts_of_other_kinds_are_refused_with_the_reason(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt 1: 'multi_modal_data' is not taken here: this model takes text alone"):
        llm.generate([[1], {"prompt_token_ids": [1], "multi_modal_data": {"image": b""}}])
    salted = quintet.TokensPrompt(prompt_token_ids=[1], cache_salt="mine")
    assert llm.generate(salted, greedy(), use_tqdm=False)[0].outputs[0].token_ids == expected([1], 8)


def test_nothing_that_is_there_is_refused() -> None:
    for cls in (LLM, AsyncLLM):
        assert not METHODS.keys() & vars(cls).keys()
        for call in (cls.generate, cls.chat):
            assert not ARGUMENTS.keys() & inspect.signature(call).parameters.keys()
    assert not NAMES.keys() & set(quintet.__all__)
    assert not PARAMETERS.keys() & {each.name for each in setting_fields(SamplingParams)}


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
def test_the_signature_has_every_setting_by_name(cls: type) -> None:
    shown = inspect.signature(cls).parameters
    assert list(shown)[0] == "model" and not any(each.kind is each.VAR_KEYWORD for each in shown.values())
    for each in setting_fields(EngineConfig):
        assert each.name in shown
        if each.name != "model":
            assert f"    {each.name}: " in (cls.__init__.__doc__ or "")  # type: ignore[misc]
    assert shown["max_num_seqs"].default == 256 and shown["max_num_seqs"].annotation is int


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams, BeamSearchParams, StructuredOutputsParams])
def test_help_says_what_each_field_means(cls: type) -> None:
    text = " ".join(pydoc.plain(pydoc.render_doc(cls)).replace("|", " ").split())
    for each in setting_fields(cls):
        assert " ".join(f"{each.name}: {each.metadata['help']}".split()) in text


def test_priority_is_refused_where_nothing_runs_by_it(llm: LLM) -> None:
    says = "priority changes nothing here; start the engine with scheduling_policy='priority', or leave it out"
    with pytest.raises(ValueError, match=says):
        llm.generate([[1], [2]], greedy(), priority=[1, 0])
    assert len(llm.generate([[1], [2]], greedy(), use_tqdm=False, priority=[0, 0])) == 2
    by_priority = LLM(str(folder()), scheduling_policy="priority", **SETTINGS)
    assert len(by_priority.generate([[1], [2]], greedy(), use_tqdm=False, priority=[1, 0])) == 2


def test_a_request_id_may_come_third_as_in_vllm() -> None:
    engine = AsyncLLM(str(folder()), **SETTINGS)

    async def main() -> None:
        async for output in engine.generate([1], greedy(), "mine"):
            assert output.request_id == "mine"
        with pytest.raises(ValueError, match="priority changes nothing here"):
            async for _ in engine.generate([1], greedy(), "mine", priority=1):
                pass

    asyncio.run(main())
    engine.shutdown()
