"""Pictures of chat models: transformers' tokens of the same prompt, whatever runs beside it and however it is cut."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet import LLM, SamplingParams
from quintet.media.families import FAMILIES
from quintet.media.items import MediaItem
from quintet.models.transformers.tower import MediaTower
from tests.helpers.media.wrappers import ONE, SEEING, TWO, Made, make, picture, picture_prompts

pytest.importorskip("PIL")

COUNT = 6
# a placeholder that is generated would count as one more item, where positions follow from the tokens
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, allowed_token_ids=list(range(256)))
SMALL = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": "16M", "use_tqdm": False}
THREE, OTHER = picture(64, 64, 3), picture(40, 56, 9)
# one run of tokens each; three rotary positions and rows of several levels; several runs
QUICK = ("llava", "qwen3_vl", "idefics3")
KINDS = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in SEEING]


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    yield make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("llava", tmp_path_factory.mktemp("llava"))


def cases(made: Made) -> dict[str, tuple[str, list[Any]]]:
    here, found = made.token, picture_prompts(made)
    if FAMILIES[made.model.config.model_type].kinds["image"].single:
        return {**found, "two": ("another", [TWO]), "the same twice": ("a third", [THREE])}
    return {**found, "the same twice": (f"a {here} b {here} c {here} d", [THREE, ONE, THREE])}


def prompt(text: str, pictures: list[Any], **more: Any) -> dict[str, Any]:
    return {"prompt": text, **({"multi_modal_data": {"image": pictures}} if pictures else {}), **more}


def tokens(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


def wanted(made: Made, case: tuple[str, list[Any]]) -> list[int]:
    return made.greedy(*case, COUNT, 256)


def opened(made: Made, **settings: Any) -> LLM:
    length = made.wrapper.length
    return LLM(
        str(made.folder),
        **{**SMALL, "max_model_len": length, "mm_processor_kwargs": made.wrapper.options, **settings},
    )


def test_tokens_are_those_of_transformers_alone_together_and_from_the_cache(made: Made) -> None:
    llm, want = opened(made), [wanted(made, case) for case in cases(made).values()]
    prompts = [prompt(*case) for case in cases(made).values()]
    assert [tokens(llm, [each])[0] for each in prompts] == want
    assert tokens(llm, prompts) == want, "each begins with pages of before"
    llm.reset_prefix_cache()
    assert tokens(llm, prompts) == want, "all at once"


def test_token_ids_of_the_processor_are_the_prompts(made: Made) -> None:
    llm = opened(made, num_pages=max(100, 8 + made.wrapper.length // 16), kv_cache_memory_bytes=None)
    for name, case in cases(made).items():
        ids = made.inputs(*case)["input_ids"][0].tolist()
        (output,) = llm.generate(prompt(*case), replace(GREEDY, max_tokens=1), use_tqdm=False)
        assert output.prompt_token_ids == ids, name
        bare = made.processor.tokenizer(case[0])["input_ids"]
        numbered = FAMILIES[made.model.config.model_type].numbered and len(case[1]) > 1
        if numbered or made.model.config.model_type == "idefics2":  # what it writes depends on more than the picture
            bare = ids
        if FAMILIES[made.model.config.model_type].prefix:  # its processor writes tokens between pictures and text
            places = [at for at, each in enumerate(ids) if each == 258]
            bare = [each for at, each in enumerate(ids) if at not in places or places.index(at) % 16 == 0]
        for given in (bare, ids):  # a placeholder for each picture, or all of its tokens
            data = {"multi_modal_data": {"image": case[1]}} if case[1] else {}
            (output,) = llm.generate({"prompt_token_ids": given, **data}, GREEDY, use_tqdm=False)
            assert output.prompt_token_ids == ids, name


def test_a_prompt_is_cut_at_any_token(made: Made) -> None:
    llm, (text, pictures) = opened(made, enable_prefix_caching=False), cases(made)["two"]
    (want,) = tokens(llm, [prompt(text, pictures)])
    client = llm._client
    scheduler = client.engine.scheduler  # type: ignore[union-attr]
    limits = scheduler.limits
    size = made.inputs(text, pictures)["input_ids"].shape[1]
    for border in range(1, size, max(3, size // 48)):
        (parsed,) = client.parse(prompt(text, pictures))
        client.add(str(border), parsed, GREEDY)
        scheduler.limits = replace(limits, max_num_batched_tokens=border)  # type: ignore[misc]
        client.step()
        scheduler.limits = limits  # type: ignore[misc]
        found: list[int] = []
        while client.busy:
            found += [token for output in client.step() for token in output.outputs[0].token_ids[len(found) :]]
        assert found == want, border


def test_requests_that_are_preempted_go_on_with_their_pictures(made: Made) -> None:
    names = ("one", "two", "the same twice", "odd")
    prompts = [prompt(*cases(made)[name]) for name in names]
    long = replace(GREEDY, max_tokens=40)
    llm = opened(made, enable_prefix_caching=False)
    want = [tokens(llm, [each], long)[0] for each in prompts]
    size = max(len(each.prompt_token_ids or ()) for each in llm.generate(prompts, GREEDY, use_tqdm=False))
    pages = 1 + llm._client.engine_plan.memory_plan.model_memory.pages_for(size + 40, 16)  # the longest fits alone
    tight = {"max_num_batched_tokens": 80} if "gemma4" in made.model.config.model_type else {}  # windows fit less, too
    if tight:
        planned = opened(made, max_model_len=size + 40, **tight)._client.engine_plan.memory_plan
        pages = 1 + planned.model_memory.pages_for(size + 40, 16)
    few = opened(made, num_pages=pages, kv_cache_memory_bytes=None, max_model_len=size + 40, **tight)
    assert tokens(few, prompts, long) == want
    alone = made.wrapper.length > 512  # prompts so long that none is admitted beside another
    assert few.get_stats()["num_preemptions"] > 0 or alone


def test_another_picture_never_finds_the_pages_of_the_first(llava: Made) -> None:
    llm, here = opened(llava), llava.token
    text = f"A text of more than one page of tokens, so that some can be found again {here} what is it?"
    (first,) = llm.generate(prompt(text, [ONE]), GREEDY, use_tqdm=False)
    (again,) = llm.generate(prompt(text, [ONE]), GREEDY, use_tqdm=False)
    (other,) = llm.generate(prompt(text, [OTHER]), GREEDY, use_tqdm=False)
    assert again.num_cached_tokens == 96 and len(first.prompt_token_ids or ()) == 100
    assert other.prompt_token_ids == first.prompt_token_ids and other.num_cached_tokens == 64
    assert list(other.outputs[0].token_ids) == wanted(llava, (text, [OTHER]))
    assert list(again.outputs[0].token_ids) == wanted(llava, (text, [ONE]))


@pytest.mark.slow
def test_crops_of_pictures_beside_others_without_any(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = make("deepseek_ocr2", tmp_path_factory.mktemp("crops"))
    llm, small = opened(made), picture(40, 44, 1)
    both = [(f"a {made.token} b {made.token}", each) for each in ([ONE, small], [small, ONE])]
    assert [tokens(llm, [prompt(*case)])[0] for case in both] == [wanted(made, case) for case in both]


def test_completions_of_one_prompt_share_its_picture(llava: Made) -> None:
    llm = opened(llava)
    (output,) = llm.generate(prompt(*cases(llava)["one"]), replace(GREEDY, n=3), use_tqdm=False)
    assert [list(each.token_ids) for each in output.outputs] == [wanted(llava, cases(llava)["one"])] * 3


def test_a_picture_that_cannot_be_encoded_ends_its_own_requests(llava: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, encode = opened(llava), MediaTower.encode
    prompts = [prompt(*cases(llava)[name]) for name in ("one", "none", "two")]
    third = prompt(f"third {llava.token}", [THREE])
    want = tokens(llm, [*prompts, third])
    bad = llm._client.parse(prompts[0])[0].media[0].digest
    llm.reset_prefix_cache()

    def broken(self: MediaTower, item: MediaItem) -> tuple[Tensor, ...]:
        if item.digest == bad:
            raise RuntimeError("no such picture")
        return encode(self, item)

    monkeypatch.setattr(MediaTower, "encode", broken)
    outputs = llm.generate([*prompts, third], GREEDY, use_tqdm=False)
    assert [each.outputs[0].finish_reason for each in outputs] == ["error", "length", "error", "length"]
    assert "no such picture" in str(outputs[0].outputs[0].error)
    assert [list(outputs[at].outputs[0].token_ids) for at in (1, 3)] == [want[1], want[3]]
    monkeypatch.setattr(MediaTower, "encode", encode)
    assert tokens(llm, [*prompts, third]) == want, "nothing of the failure is found again"


def test_an_encoder_is_asked_once_for_equal_pictures_and_never_for_found_ones(
    llava: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, encode, count = opened(llava), MediaTower.encode, [0]

    def counted(self: MediaTower, item: MediaItem) -> tuple[Tensor, ...]:
        count[0] += 1
        return encode(self, item)

    monkeypatch.setattr(MediaTower, "encode", counted)
    tokens(llm, [prompt(*cases(llava)["the same twice"])] * 3)
    assert count == [2]
    tokens(llm, [prompt(*cases(llava)["the same twice"])])
    assert count == [2]


def test_weights_of_the_tower_sleep_wake_and_are_replaced(llava: Made, tmp_path_factory: Any) -> None:
    llm, case = opened(llava), cases(llava)["one"]
    (want,) = tokens(llm, [prompt(*case)])
    llm.sleep(level=2)
    llm.wake_up()
    assert tokens(llm, [prompt(*case)]) == [want]
    folder, other = tmp_path_factory.mktemp("other"), replace(llava, model=copy.deepcopy(llava.model))
    with torch.no_grad():
        for name, parameter in other.model.named_parameters():
            if "language_model" not in name and "lm_head" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    other.model.save_pretrained(folder)
    changed = wanted(other, case)
    assert changed != want
    llm.reload_weights(str(folder))
    assert tokens(llm, [prompt(*case)]) == [changed]


@pytest.mark.slow  # two processes start
def test_ranks_that_are_processes_encode_alike(made: Made) -> None:
    llm = opened(made, tensor_parallel_size=2, distributed_executor_backend="mp")
    try:
        found = tokens(llm, [prompt(*case) for case in cases(made).values()])
    finally:
        llm.close()
    assert found == [wanted(made, case) for case in cases(made).values()]


def test_placeholders_that_have_no_positions_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = make("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"))
    llm, case = opened(made), cases(made)["one"]
    want = tokens(llm, [prompt(*case)])
    ids = made.inputs(*case)["input_ids"][0].tolist()
    split = [*ids[: ids.index(258) + 1], 65, *ids[ids.index(258) + 1 :]]  # a letter among a picture's tokens
    with pytest.raises(ValueError, match="finds no positions"):
        llm.generate({"prompt_token_ids": split, "multi_modal_data": {"image": [ONE]}}, GREEDY, use_tqdm=False)
    assert tokens(llm, [prompt(*case)]) == want
