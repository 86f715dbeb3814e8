"""Videos and recordings of chat models: transformers' tokens of the same prompt, whatever runs beside it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from quintet import LLM, SamplingParams
from quintet.media.families import FAMILIES
from quintet.media.items import MediaItem
from quintet.models.transformers.tower import MediaTower
from tests.helpers.media.wrappers import HEARING, MOVING, Made, make, picture, sound, video

pytest.importorskip("PIL")

COUNT = 6
# transformers counts tokens of videos that are generated, too: none is
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, allowed_token_ids=list(range(256)))
SMALL = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": "16M", "use_tqdm": False}
# positions that follow from seconds; a tower that has no method of its own; positions of sound beside pictures
QUICK = (("qwen2_5_vl", "video"), ("qwen2_audio", "audio"), ("qwen2_5_omni", "audio"))
TRIED = [*((name, "video") for name in MOVING), *((name, "audio") for name in HEARING)]
KINDS = [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow, id="-".join(each)) for each in TRIED]
VIDEOS = (video(4, 40, 56, 1), {"fps": 2.0}), (video(4, 31, 90, 2), {"fps": 0.75}), (video(4, 64, 64, 3), {"fps": 30.0})
SOUNDS = sound(0.7, 1), sound(0.31, 2), sound(1.0, 3)
Case = tuple[str, list[Any], dict[str, list[Any]]]  # text, pictures, other media


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    name, kind = request.param
    yield replace(make(name, tmp_path_factory.mktemp(name)), kind=kind)


def items(made: Made) -> tuple[str, str, tuple[Any, ...]]:
    """The kind that is tried, its placeholder, and three items."""
    if made.kind == "video":
        return made.kind, made.token_of(made.kind), VIDEOS
    alike = made.model.config.model_type == "phi4_multimodal"  # it hears what transformers fills shorter ones up with
    return made.kind, made.token_of(made.kind), heard(made, *(sound(0.7, at) for at in range(3)) if alike else SOUNDS)


def heard(made: Made, *samples: Any) -> tuple[Any, ...]:
    """Recordings with the rate of the model's processor, which changes nothing of them."""
    part = getattr(made.processor, "audio_processor", None) or made.processor.feature_extractor
    return tuple((each, part.sampling_rate) for each in samples)


def cases(made: Made) -> dict[str, Case]:
    """Prompts, with the media of each."""
    kind, here, (one, two, three) = items(made)
    found: dict[str, Case] = {
        "none": ("Hello there", [], {}),
        "one": (f"What is {here} this?", [], {kind: [one]}),
        "two": (f"{here}{here} both", [], {kind: [one, two]}),
        "the same twice": (f"a {here} b {here} c {here} d", [], {kind: [three, one, three]}),
    }
    facts = FAMILIES[made.model.config.model_type].kinds[kind]
    if facts.single:
        found |= {"two": (f"{here} both", [], {kind: [two]}), "the same twice": (f"a {here} b", [], {kind: [three]})}
    if kind == "audio" and not facts.cut:
        found["of several windows"] = (f"so {here} long", [], {kind: [*heard(made, sound(2.7, 4))]})
    if (
        made.wrapper.vision
        and not FAMILIES[made.model.config.model_type].apart
        and made.model.config.model_type != "smolvlm"
    ):  # transformers' own mixes up its kinds
        found["beside pictures"] = (f"a {made.token} b {here} c {made.token}", [picture(40, 56, 1)] * 2, {kind: [two]})
        found["before a picture"] = (f"{here}{made.token}", [picture(31, 90, 5)], {kind: [one]})
    if kind == "audio" and made.wrapper.video_processor:
        both = {"video": [VIDEOS[1]], "audio": [two]}
        found["beside a video"] = (f"{here} a {made.token_of('video')} b", [], both)
    if kind == "video" and not made.model.config.model_type == "smolvlm":
        found["an odd number of frames"] = (f"{here}?", [], {kind: [(video(3, 40, 40, 7), {"fps": 1.0})]})
    return found


def prompt(text: str, pictures: list[Any], media: dict[str, list[Any]]) -> dict[str, Any]:
    data = {**media, **({"image": pictures} if pictures else {})}
    return {"prompt": text, **({"multi_modal_data": data} if data else {})}


def tokens(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


def opened(made: Made, **settings: Any) -> LLM:
    length = max(1024, made.wrapper.length)
    given = {**SMALL, "max_model_len": length, "mm_processor_kwargs": made.wrapper.options, **settings}
    return LLM(str(made.folder), **given)


def wanted(made: Made, case: Case) -> list[int]:
    text, pictures, media = case
    return made.generated(text, pictures, media, COUNT, 256)


def test_tokens_are_those_of_transformers_alone_together_and_from_the_cache(made: Made) -> None:
    llm, want = opened(made), [wanted(made, case) for case in cases(made).values()]
    prompts = [prompt(*case) for case in cases(made).values()]
    assert [tokens(llm, [each])[0] for each in prompts] == want
    assert tokens(llm, prompts) == want, "each begins with pages of before"
    llm.reset_prefix_cache()
    assert tokens(llm, prompts) == want, "all at once"


def test_token_ids_of_the_processor_are_the_prompts(made: Made) -> None:
    llm = opened(made)
    for name, case in cases(made).items():
        text, pictures, media = case
        ids = made.inputs(*case)["input_ids"][0].tolist()
        (output,) = llm.generate(prompt(*case), replace(GREEDY, max_tokens=1), use_tqdm=False)
        assert output.prompt_token_ids == ids, name
        if pictures and made.model.config.model_type == "internvl":  # both kinds have one token
            continue
        (output,) = llm.generate({**prompt(*case), "prompt": None, "prompt_token_ids": ids}, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == ids and list(output.outputs[0].token_ids) == wanted(made, case), name


def test_a_prompt_is_cut_at_any_token(made: Made) -> None:
    llm, case = opened(made, enable_prefix_caching=False), cases(made)["two"]
    (want,) = tokens(llm, [prompt(*case)])
    client = llm._client
    scheduler = client.engine.scheduler  # type: ignore[union-attr]
    limits, size = scheduler.limits, made.inputs(*case)["input_ids"].shape[1]
    for border in range(1, size, max(3, size // 24)):
        (parsed,) = client.parse(prompt(*case))
        client.add(str(border), parsed, GREEDY)
        scheduler.limits = replace(limits, max_num_batched_tokens=border)  # type: ignore[misc]
        client.step()
        scheduler.limits = limits  # type: ignore[misc]
        found: list[int] = []
        while client.busy:
            found += [token for output in client.step() for token in output.outputs[0].token_ids[len(found) :]]
        assert found == want, border


def test_requests_that_are_preempted_go_on_with_their_media(made: Made) -> None:
    prompts = [prompt(*cases(made)[name]) for name in ("one", "two", "the same twice")]
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
    narrow = made.wrapper.text.get("sliding_window") == 20  # requests give pages back as fast as they take others
    alone = made.wrapper.length > 512  # prompts so long that none is admitted beside another
    assert few.get_stats()["num_preemptions"] > 0 or narrow or alone


def test_another_item_never_finds_the_pages_of_the_first(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, count = MediaTower.encode, [0]

    def counted(self: MediaTower, item: MediaItem) -> tuple[Tensor, ...]:
        count[0] += 1
        return encode(self, item)

    monkeypatch.setattr(MediaTower, "encode", counted)
    llm, (kind, here, (one, *_)) = opened(made), items(made)
    text = f"A text of more than one page of tokens, so that some can be found again {here} what is it?"
    other = (one[0][::-1].copy(), one[1])
    first, again, third = ((text, [], {kind: [each]}) for each in (one, one, other))
    outputs = [llm.generate(prompt(*case), GREEDY, use_tqdm=False)[0] for case in (first, again, third)]
    assert count == [2], "the second was found"
    (parsed,) = llm._client.parse(prompt(*third))
    stateful = str(made.wrapper.text.get("model_type")).startswith(("qwen3_5", "lfm3", "nemotron_h"))
    least = 0 if stateful else 64  # states are not kept at every page
    assert outputs[1].num_cached_tokens > parsed.media[0].spans[0][0] >= outputs[2].num_cached_tokens >= least
    assert [list(each.outputs[0].token_ids) for each in outputs] == [
        wanted(made, each) for each in (first, again, third)
    ]


def test_the_seconds_of_a_video_are_part_of_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = make("qwen2_5_vl", tmp_path_factory.mktemp("seconds"))
    llm, frames, here = opened(made), video(6, 40, 56, 1), made.token_of("video")
    for fps in (0.25, 1.0, 4.0):  # equal pixels: only the positions differ, and so do K and V of the pages
        case: Case = (f"{here}" + "a text behind it" * 3, [], {"video": [(frames, {"fps": fps})]})
        assert tokens(llm, [prompt(*case)]) == [wanted(made, case)], fps
    with pytest.raises(ValueError, match="rotary positions up to"):
        tokens(llm, [prompt(here, [], {"video": [(frames, {"fps": 1e-6})]})])


def test_rates_other_than_the_models_are_resampled(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = make("qwen2_audio", tmp_path_factory.mktemp("rates"))
    llm, times = opened(made), np.arange(24000) / 24000
    high = (0.3 * np.sin(2 * np.pi * 440 * times)).astype(np.float32)[:18000]
    low = (0.3 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)).astype(np.float32)[:12000]
    text = f"{made.token} what"
    outputs = [
        llm.generate({"prompt": text, "multi_modal_data": {"audio": each}}, GREEDY, use_tqdm=False)[0]
        for each in ((high, 24000), low)
    ]
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
    with pytest.raises(ValueError, match="a recording has 1.5 s, and this model hears 1 s"):
        tokens(llm, [prompt(text, [], {"audio": [sound(1.5)]})])
    with pytest.raises(ValueError, match="of the kind image, and this model takes audio"):
        tokens(llm, [prompt(text, [picture(8, 8)], {})])


def test_a_kind_of_which_there_may_be_none_is_refused_and_others_are_not(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made = make("llava_onevision", tmp_path_factory.mktemp("limits"))
    llm = opened(made, limit_mm_per_prompt={"image": 0, "video": 1})
    one: Case = (f"{made.token_of('video')} x", [], {"video": [VIDEOS[0]]})
    assert tokens(llm, [prompt(*one)]) == [wanted(made, one)]
    with pytest.raises(ValueError, match="image"):
        tokens(llm, [prompt(made.token, [picture(8, 8)], {})])
    with pytest.raises(ValueError, match="2 items of the kind video, and 1 are the most"):
        tokens(llm, [prompt(made.token_of("video") * 2, [], {"video": [VIDEOS[0]] * 2})])
    none = opened(made, limit_mm_per_prompt={"image": 0, "video": 0})
    assert none._client.engine_plan.sizes.tower is None  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="limit_mm_per_prompt has 0 of each kind"):
        tokens(none, [prompt(*one)])
