"""Whisper by the engine: tokens equal to transformers', whatever runs beside a request, and one encoding per audio."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from quintet import LLM, AsyncLLM, SamplingParams
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from tests.helpers.checkpoints.whisper import (
    DE,
    EN,
    EOT,
    NO_SPEECH,
    PROMPT,
    ROWS,
    SOT,
    TIMED,
    TRANSCRIBE,
    features_of,
    greedy,
    small_model,
    tone,
)  # fmt: skip
from tests.helpers.platforms import tpu
from tests.helpers.platforms.null_engine import drain

COUNT = 24
PAGES_OF_AUDIO = -(-ROWS // 16)
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "num_pages": 200, "page_size": 16,
}  # fmt: skip
TPU: dict[str, Any] = {
    "device": "tpu", "max_num_batched_tokens": 16, "max_num_seqs": 4, "compilation_cache_dir": tpu.programs().name,
}  # fmt: skip
DEVICES = [pytest.param({}, id="cpu"), pytest.param(TPU, id="tpu", marks=[tpu.needs_jax, pytest.mark.slow])]
ENGINES: dict[str, dict[str, Any]] = {
    "batched": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 3, "max_num_seqs": 3},
    "preempted": {"num_pages": 2 * (PAGES_OF_AUDIO + 8), "page_size": 8, "enable_prefix_caching": False},
    "preempted, cached": {"num_pages": 4 * PAGES_OF_AUDIO + 5, "page_size": 8},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_seqs": 2},
    "eager": {"enforce_eager": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}
AUDIOS = {seed: tone(seed, 0.4 + 0.3 * seed) for seed in range(5)}
PROMPTS = [PROMPT, TIMED, [SOT, DE, TRANSCRIBE], [SOT], [*range(2, 30), *PROMPT]]


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": COUNT, "detokenize": False, **given})


def client(**settings: Any) -> EngineClient:
    folder, _ = small_model()
    return EngineClient(EngineConfig.from_kwargs(model=str(folder), **{**SETTINGS, **settings}), progress=False)


def with_audio(ids: list[int], audio: Any) -> dict[str, Any]:
    return {"prompt_token_ids": ids, "multi_modal_data": {"audio": audio}}


def add(made: EngineClient, name: str, ids: list[int], audio: Any, **given: Any) -> None:
    [prompt] = made.parse(with_audio(ids, audio))
    made.add(name, prompt, params(**given))


def tokens_of(outputs: dict[str, Any]) -> dict[str, list[int]]:
    assert not any(each.outputs[0].error for each in outputs.values()), outputs
    return {name: list(each.outputs[0].token_ids) for name, each in outputs.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Of each audio and prompt, by transformers."""
    _, model = small_model()
    return {
        f"{seed} {index}": greedy(model, features_of(audio), ids, COUNT)
        for seed, audio in AUDIOS.items()
        for index, ids in enumerate(PROMPTS)
    }


@pytest.mark.parametrize("name", [*ENGINES, pytest.param("tpu", marks=tpu.needs_jax)])
def test_tokens_equal_transformers(name: str, expected: dict[str, list[int]]) -> None:
    made = client(**{**ENGINES, "tpu": TPU}[name])
    for _ in range(2):  # the second time steps are replayed, and beginnings are cached
        for seed, audio in AUDIOS.items():
            for index, ids in enumerate(PROMPTS):
                add(made, f"{seed} {index}", ids, audio)
        while made.busy:
            outputs = drain(made) if name != "preempted" else stepped(made)
        assert tokens_of(outputs) == expected
    if name.startswith("preempted"):
        assert made.engine.scheduler.stats().num_preemptions, "nothing was preempted"
    made.close()


def stepped(made: EngineClient) -> dict[str, Any]:
    """Runs with the bookkeeping checked after each step."""
    outputs: dict[str, Any] = {}
    while made.busy:
        outputs.update({each.request_id: each for each in made.step()})
        made.engine.check_integrity()
    return outputs


def test_the_answers_differ_by_audio(expected: dict[str, list[int]]) -> None:
    """Else nothing above would show that an audio is heard."""
    assert len({tuple(tokens) for name, tokens in expected.items() if name.endswith(" 0")}) == len(AUDIOS)


@pytest.mark.parametrize("settings", DEVICES)
def test_an_audio_is_encoded_once(settings: dict[str, Any]) -> None:
    """Language detection, a fallback temperature, another task and several completions share a pass."""
    made = client(**settings)
    encoder = made.engine.scheduler.kv_cache_manager.encoder
    add(made, "detect", [SOT], AUDIOS[1], max_tokens=1, logprob_token_ids=[EN, DE, NO_SPEECH])
    drain(made)
    for turn, given in enumerate(({}, {"temperature": 0.4, "seed": 1}, {"n": 3, "temperature": 1.0, "seed": 2})):
        add(made, str(turn), TIMED, AUDIOS[1], **given)
    stepped(made)
    assert encoder.num_passes == 1
    assert encoder.num_hits == 5
    add(made, "another", TIMED, AUDIOS[2])
    drain(made)
    assert encoder.num_passes == 2
    made.engine.reset_prefix_cache()
    add(made, "again", TIMED, AUDIOS[1])
    drain(made)
    assert encoder.num_passes == 3
    assert made.metrics()["num_encoder_passes"] == 3
    made.close()


def test_tenants_do_not_share_what_is_encoded() -> None:
    made = client()
    for salt in ("a", "b", "a"):
        [prompt] = made.parse({**with_audio(PROMPT, AUDIOS[1]), "cache_salt": salt})
        made.add(salt, prompt, params())
        drain(made)
    assert made.engine.scheduler.kv_cache_manager.encoder.num_passes == 2
    made.close()


@pytest.mark.parametrize("settings", DEVICES)
def test_language_and_silence_by_log_probabilities(settings: dict[str, Any]) -> None:
    """One token after <|startoftranscript|>: log-probabilities are the model's own, whatever rules say."""
    _, model = small_model()
    made = client(**settings)
    add(made, "detect", [SOT], AUDIOS[3], max_tokens=1, logprob_token_ids=[EN, DE, NO_SPEECH])
    found = drain(made)["detect"].outputs[0].logprobs[0]
    with torch.inference_mode():
        logits = model(features_of(AUDIOS[3]), decoder_input_ids=torch.tensor([[SOT]])).logits[0, -1]
    want = logits.log_softmax(-1)
    for token in (EN, DE, NO_SPEECH):
        assert found[token].logprob == pytest.approx(want[token].item(), abs=1e-4)
    made.close()


def test_cancelled_requests_leave_nothing() -> None:
    made = client()
    pool = made.engine.scheduler.pool
    for seed, audio in AUDIOS.items():
        add(made, str(seed), TIMED, audio, ignore_eos=True)
    made.abort(["0"])  # before its pass
    made.step()
    made.abort(["1", "2"])
    made.engine.check_integrity()
    made.step()
    made.abort(["3", "4"])
    made.engine.check_integrity()
    assert pool.num_used == 0 and not made.engine.busy
    made.close()


def test_a_planned_pass_of_a_dropped_request_does_not_run() -> None:
    made = client()
    manager = made.engine.scheduler.kv_cache_manager
    add(made, "a", TIMED, AUDIOS[1])
    plan = made.engine.scheduler.schedule()
    [request] = plan.tokens
    assert len(plan.row_writes) == 1
    made.engine.scheduler.drop_planned(plan, request)
    made.abort(["a"])
    assert not plan.row_writes and not manager.pool.num_cached and manager.encoder.num_passes == 0
    made.engine.check_integrity()
    made.close()


def test_memory_of_audio_is_planned() -> None:
    """One request of the model's length fits, or the start says what is missing."""
    with pytest.raises(ValueError, match="KV cache needs"):
        client(num_pages=1 + PAGES_OF_AUDIO + 3)
    made = client(num_pages=1 + PAGES_OF_AUDIO + 4, max_model_len=64)
    add(made, "a", PROMPT, AUDIOS[0], ignore_eos=True, max_tokens=60)
    add(made, "b", PROMPT, AUDIOS[1], ignore_eos=True, max_tokens=60)
    found = tokens_of(stepped(made))
    _, model = small_model()
    assert found == {
        name: greedy(model, features_of(AUDIOS[at]), PROMPT, 60, stops=False) for at, name in enumerate("ab")
    }
    made.close()


def test_steps_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("quintet._cpu", reason="steps are recorded by the compiled extension")
    from quintet.platforms.cpu.graph import Replay

    seen: list[Replay] = []
    begin = Replay.__init__

    def watched(self: Replay, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        seen.append(self)

    monkeypatch.setattr(Replay, "__init__", watched)
    made = client()
    add(made, "a", PROMPT, AUDIOS[1], ignore_eos=True)
    drain(made)
    decoder = max(seen, key=lambda each: len(each._graphs))
    assert not any(each.refused for each in seen)
    assert max(graph.replays for graph in decoder._graphs.values()) > COUNT // 2
    made.close()


def test_prompts_of_both_forms() -> None:
    folder, _ = small_model()
    llm = LLM(str(folder), use_tqdm=False, **SETTINGS)
    audio, given = AUDIOS[2], {"multi_modal_data": {"audio": AUDIOS[2]}}
    forms: list[Any] = [
        with_audio(PROMPT, audio),
        with_audio(PROMPT, [audio]),
        with_audio(PROMPT, (audio, 16_000)),
        with_audio(PROMPT, audio.tolist()),
        with_audio(PROMPT, torch.from_numpy(audio)),
        {"encoder_prompt": {"prompt": "", **given}, "decoder_prompt": PROMPT},
        {"encoder_prompt": given, "decoder_prompt": {"prompt_token_ids": PROMPT}},
    ]
    found = [list(each.outputs[0].token_ids) for each in llm.generate(forms, params(), use_tqdm=False)]
    assert all(each == found[0] for each in found)
    started = llm.generate([{"encoder_prompt": given, "decoder_prompt": None}, with_audio([SOT], audio)], params())
    assert started[0].outputs[0].token_ids == started[1].outputs[0].token_ids
    slow = llm.generate([with_audio(PROMPT, (tone(7, 1.0, 8000), 8000))], params(), use_tqdm=False)
    assert slow[0].outputs[0].token_ids
    llm.close()


def test_the_same_by_an_event_loop() -> None:
    folder, model = small_model()
    llm = AsyncLLM(str(folder), **SETTINGS)

    async def transcribe(seed: int) -> list[int]:
        found: list[int] = []
        async for output in llm.generate(with_audio(TIMED, AUDIOS[seed]), params()):
            found = list(output.outputs[0].token_ids)
        return found

    async def both() -> list[list[int]]:
        return await asyncio.gather(*map(transcribe, (1, 3)))

    assert asyncio.run(both()) == [greedy(model, features_of(AUDIOS[at]), TIMED, COUNT) for at in (1, 3)]
    llm.shutdown()


HOSTILE: dict[str, tuple[Any, str]] = {
    "no audio": (PROMPT, "has none"),
    "no media": ({"prompt_token_ids": PROMPT}, "has none"),
    "NaN": (with_audio(PROMPT, np.array([0.0, np.nan], np.float32)), "NaN"),
    "empty": (with_audio(PROMPT, np.zeros(0, np.float32)), "empty"),
    "an empty list": (with_audio(PROMPT, []), "shape|empty|type"),
    "two channels": (with_audio(PROMPT, np.zeros((2, 100), np.float32)), "shape"),
    "integers": (with_audio(PROMPT, np.zeros(100, np.int16)), "int16"),
    "text": (with_audio(PROMPT, "audio.wav"), "type"),
    "nothing": (with_audio(PROMPT, None), "type"),
    "ragged": (with_audio(PROMPT, [[1.0], [1.0, 2.0]]), "array|shape"),
    "rate 0": (with_audio(PROMPT, (AUDIOS[0], 0)), "rate"),
    "rate of text": (with_audio(PROMPT, (AUDIOS[0], "16k")), "rate"),
    "rate NaN": (with_audio(PROMPT, (AUDIOS[0], float("nan"))), "rate"),
    "a triple": (with_audio(PROMPT, (AUDIOS[0], 16000, 1)), "tuple of 3"),
    "too long": (with_audio(PROMPT, np.zeros(16_000 * 2 + 1, np.float32)), "cut it"),
    "too long at 8 kHz": (with_audio(PROMPT, (np.zeros(8000 * 3, np.float32), 8000)), "3.0 s long"),
    "an image": ({"prompt_token_ids": PROMPT, "multi_modal_data": {"image": 1}}, "audio"),
    "two kinds": ({"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": AUDIOS[0], "image": 1}}, "audio"),
    "encoder's text": (
        {"encoder_prompt": {"prompt": "x", "multi_modal_data": {"audio": AUDIOS[0]}}, "decoder_prompt": PROMPT},
        "must be empty",
    ),
    "encoder's ids": ({"encoder_prompt": [1, 2], "decoder_prompt": PROMPT}, "encoder_prompt"),
    "nested": ({"encoder_prompt": {}, "decoder_prompt": with_audio(PROMPT, AUDIOS[0])}, "decoder_prompt"),
    "a token beyond": (with_audio([10_000], AUDIOS[0]), "10000"),
    "a long prompt": (with_audio([3] * 64, AUDIOS[0]), "max_model_len"),
}


@pytest.fixture(scope="module")
def served() -> Any:
    folder, _ = small_model()
    llm = LLM(str(folder), use_tqdm=False, **SETTINGS)
    yield llm
    llm.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_prompts_are_refused(served: LLM, name: str) -> None:
    prompt, why = HOSTILE[name]
    with pytest.raises(ValueError, match=why):
        served.generate([prompt], params(), use_tqdm=False)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stages": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    "numbers": ({"runner": "pooling"}, "runner"),
    "adapters": ({"enable_lora": True}, "enable_lora"),
    "embeddings": ({"enable_prompt_embeds": True}, "enable_prompt_embeds"),
    "offloading": ({"kv_offloading_size": 0.01}, "kv_offloading_size"),
    "length": ({"max_model_len": 65}, "64 positions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_it_does_not_have(name: str) -> None:
    settings, why = REFUSED[name]
    with pytest.raises(ValueError, match=why):
        client(**settings)


def test_platforms_without_cross_attention_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.platforms.cpu.platform.CPU.optional_spec_fields", frozenset({"chunk"}))
    with pytest.raises(ValueError, match="no attention to an encoder's rows"):
        client()


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"},
                                      {"kv_cache_dtype": "int8"}, {"tensor_parallel_size": 2}], ids=str)  # fmt: skip
def test_other_forms_of_weights_and_cache(settings: dict[str, Any], expected: dict[str, list[int]]) -> None:
    """Two ranks give the same tokens; rounded weights give tokens, mostly the same, alone as in a batch."""
    made = client(**settings)
    alone = []
    for seed, audio in AUDIOS.items():
        add(made, str(seed), PROMPT, audio)
        alone.append(tokens_of(drain(made))[str(seed)])
    for seed, audio in AUDIOS.items():
        add(made, str(seed), PROMPT, audio)
    assert list(tokens_of(drain(made)).values()) == alone
    want = [expected[f"{seed} 0"] for seed in AUDIOS]
    if "tensor_parallel_size" in settings:
        assert alone == want
    assert sum(got[0] == each[0] for got, each in zip(alone, want, strict=True)) >= len(AUDIOS) // 2
    made.close()


def test_text_ends_as_the_generation_config_says(expected: dict[str, list[int]]) -> None:
    assert any(tokens[-1] == EOT for tokens in expected.values()), "no transcript ends"
