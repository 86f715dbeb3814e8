"""Moonshine by the engine: tokens equal to transformers', of audio of any length, and one encoding per audio."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quintet import LLM, SamplingParams
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.media.audio.waveform import LEAST, num_rows
from tests.helpers.checkpoints.moonshine import BOS, greedy, small_moonshine
from tests.helpers.checkpoints.whisper import tone
from tests.helpers.platforms.null_engine import drain

COUNT = 24
AUDIOS = {seconds: tone(int(10 * seconds), seconds) for seconds in (0.5, 1, 3.7, 10, 10.5, 12)}
PROMPTS: list[tuple[int, ...]] = [(), (BOS, 7, 3, 11)]
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "num_pages": 400, "page_size": 16,
}  # fmt: skip
PAGES = 1 + num_rows(30 * 16_000) // 8 + 4  # of the longest audio and text
ENGINES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 3, "max_num_seqs": 3},
    "preempted": {"num_pages": PAGES, "page_size": 8, "max_model_len": 32, "enable_prefix_caching": False},
    "two ranks": {"tensor_parallel_size": 2},
}


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": COUNT, "detokenize": False, **given})


def client(folder: Path | None = None, **settings: Any) -> EngineClient:
    model = str(folder or small_moonshine()[0])
    return EngineClient(EngineConfig.from_kwargs(model=model, **{**SETTINGS, **settings}), progress=False)


def with_audio(audio: Any, prompt: tuple[int, ...] = ()) -> dict[str, Any]:
    return {**({"prompt_token_ids": list(prompt)} if prompt else {}), "multi_modal_data": {"audio": audio}}


def add(made: EngineClient, name: str, audio: Any, prompt: tuple[int, ...] = (), **given: Any) -> None:
    [parsed] = made.parse(with_audio(audio, prompt))
    made.add(name, parsed, params(**given))


def tokens_of(outputs: dict[str, Any]) -> dict[str, list[int]]:
    assert not any(each.outputs[0].error for each in outputs.values()), outputs
    return {name: list(each.outputs[0].token_ids) for name, each in outputs.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    _, model = small_moonshine()
    return {
        f"{seconds} {index}": greedy(model, audio, COUNT, prompt)
        for seconds, audio in AUDIOS.items()
        for index, prompt in enumerate(PROMPTS)
    }


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_equal_transformers(name: str, expected: dict[str, list[int]]) -> None:
    made = client(**ENGINES[name])
    for _ in range(2):  # the second time steps are replayed, and beginnings are cached
        for seconds, audio in AUDIOS.items():
            for index, prompt in enumerate(PROMPTS):
                add(made, f"{seconds} {index}", audio, prompt)
        outputs: dict[str, Any] = {}
        while made.busy:
            outputs.update({each.request_id: each for each in made.step()})
            made.engine.check_integrity()
        assert tokens_of(outputs) == expected
    assert name != "preempted" or made.engine.scheduler.stats().num_preemptions, "nothing was preempted"
    made.close()


def test_the_answers_differ_by_audio(expected: dict[str, list[int]]) -> None:
    """Else nothing above would show that an audio is heard."""
    assert len({tuple(tokens) for name, tokens in expected.items() if name.endswith(" 0")}) == len(AUDIOS)


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_a_batch_gives_what_each_audio_gives_alone(settings: dict[str, Any], expected: dict[str, list[int]]) -> None:
    """Tokens and log-probabilities are the same bits: no audio is padded to another's length."""
    made, alone = client(**settings), {}
    for seconds, audio in AUDIOS.items():
        add(made, str(seconds), audio, logprobs=0)
        alone |= {name: each.outputs[0] for name, each in drain(made).items()}
    made.engine.reset_prefix_cache()
    for seconds, audio in AUDIOS.items():
        add(made, str(seconds), audio, logprobs=0)
    together = {name: each.outputs[0] for name, each in drain(made).items()}
    assert {name: each.token_ids for name, each in together.items()} == {
        name: each.token_ids for name, each in alone.items()
    }
    assert [each.logprobs for each in together.values()] == [alone[name].logprobs for name in together]
    same = sum(each.token_ids[0] == expected[f"{name} 0"][0] for name, each in alone.items())
    assert same >= len(AUDIOS) // 2
    made.close()


def test_an_audio_is_encoded_once_and_takes_pages_by_its_length() -> None:
    made = client()
    encoder = made.engine.scheduler.kv_cache_manager.encoder
    for seconds in (0.5, 10):
        for turn, given in enumerate(({}, {"temperature": 0.4, "seed": 1}, {"n": 3, "temperature": 1.0, "seed": 2})):
            add(made, f"{seconds} {turn}", AUDIOS[seconds], **given)
    made.step()
    assert {len(pages) for pages in encoder.held_pages} == {-(-19 // 16), -(-num_rows(160_000) // 16)}
    drain(made)
    assert encoder.num_passes == 2 and encoder.num_hits == 2 * 4
    made.close()


def test_rows_are_as_many_as_transformers_encoder_gives() -> None:
    _, model = small_moonshine()
    with torch.inference_mode():
        for samples in (LEAST, LEAST + 383, LEAST + 384, 1663, 16_000, 59_200):
            assert model.model.encoder(torch.zeros(1, samples)).last_hidden_state.shape[1] == num_rows(samples)
    assert num_rows(LEAST) == 1 and num_rows(LEAST - 1) == 0


def test_shorter_audio_than_a_row_ends_in_silence() -> None:
    _, model = small_moonshine()
    made, audio = client(), AUDIOS[1][:300]
    add(made, "a", audio)
    padded = np.concatenate([audio, np.zeros(LEAST - 300, np.float32)])
    assert tokens_of(drain(made)) == {"a": greedy(model, padded, COUNT)}
    made.close()


def test_the_longest_audio_and_the_longest_text() -> None:
    folder, model = small_moonshine()
    made = client()
    audio = tone(5, 30)
    add(made, "a", audio, max_tokens=193, ignore_eos=True)
    [tokens] = tokens_of(drain(made)).values()
    want = greedy(model, audio, 193)
    assert len(tokens) == 193 and tokens[: len(want)] == want
    with pytest.raises(ValueError, match=r"30\.1 s long, and one request takes 30 s"):
        made.parse(with_audio(np.zeros(481_600, np.float32)))
    made.close()


def test_rules_of_whisper_are_not_applied() -> None:
    """Suppressed tokens are, which transformers has for all models; a timestamp's token is one like others. The text
    ends with the generation config's token."""
    suppressed = greedy(small_moonshine()[1], AUDIOS[1], 1)
    folder, model = small_moonshine(suppress_tokens=tuple(suppressed), no_timestamps_token_id=5, eos_token_id=12)
    made, want = client(folder), greedy(model, AUDIOS[1], COUNT)
    add(made, "a", AUDIOS[1])
    assert tokens_of(drain(made)) == {"a": want}
    assert want[0] != suppressed[0] and want[-1] == 12 and len(want) < COUNT
    made.close()


def test_prompts_of_both_forms() -> None:
    llm = LLM(str(small_moonshine()[0]), use_tqdm=False, **{**SETTINGS, "skip_tokenizer_init": False})
    audio, given = AUDIOS[1], {"multi_modal_data": {"audio": AUDIOS[1]}}
    forms: list[Any] = [
        given,
        {"prompt": "<s>", **given},
        with_audio((audio, 16_000), (BOS,)),
        {"encoder_prompt": {"prompt": "", **given}, "decoder_prompt": None},
        {"encoder_prompt": given, "decoder_prompt": {"prompt_token_ids": [BOS]}},
    ]
    outputs = [each.outputs[0] for each in llm.generate(forms, params(detokenize=True), use_tqdm=False)]
    assert outputs[0].text and all(each.token_ids == outputs[0].token_ids for each in outputs)
    slow = llm.generate([with_audio((tone(7, 1.0, 8000), 8000))], params(), use_tqdm=False)
    assert slow[0].outputs[0].token_ids
    llm.close()


def test_new_weights_reach_decoder_encoder_and_convolutions(tmp_path: Path) -> None:
    folder, model = small_moonshine()
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    torch.manual_seed(11)
    other = copy.deepcopy(model)
    for each in other.parameters():
        each.data += torch.randn_like(each) * 0.05
    other.save_pretrained(tmp_path)
    llm = LLM(str(folder), use_tqdm=False, **SETTINGS)

    def tokens() -> list[int]:
        return list(llm.generate([with_audio(AUDIOS[1])], params(), use_tqdm=False)[0].outputs[0].token_ids)

    assert tokens() != greedy(other, AUDIOS[1], COUNT)
    llm.update_weights(load_file(tmp_path / "model.safetensors").items())
    assert tokens() == greedy(other, AUDIOS[1], COUNT)
    llm.close()


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"model_type": "moonshine_streaming"}, "moonshine_streaming.*windows"),
        ({"encoder_num_attention_heads": 4}, "encoder_num_attention_heads 4"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path: Path, entries: dict[str, Any], why: str) -> None:
    shutil.copytree(small_moonshine()[0], tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
    with pytest.raises(ValueError, match=why):
        client(tmp_path)
