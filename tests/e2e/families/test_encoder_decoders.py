"""Encoder-decoders of text: tokens equal to transformers', whatever runs beside a request, and one pass per text."""

import asyncio
import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet import LLM, AsyncLLM, SamplingParams
from quintet.config import EngineConfig
from quintet.conformance.harness.reference_model import VOCAB, Tiny
from quintet.engine.client import EngineClient
from quintet_tools.checkpoints.encoder_decoders import (
    ENCODER_DECODERS,
    SPEECH,
    behind,
    encoder_decoder,
    encoder_input,
    written,
)  # fmt: skip
from tests.helpers.platforms import tpu

COUNT = 16
START = 2
FAMILIES = [each for each in ENCODER_DECODERS if each not in SPEECH]
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
    "preempted": {"num_pages": 1 + 16 + 6, "page_size": 8, "enable_prefix_caching": False},
    "preempted, cached": {"num_pages": 1 + 16 + 6, "page_size": 8},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_seqs": 2},
    "eager": {"enforce_eager": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "two ranks": {"tensor_parallel_size": 2},
}
ON_TPU = {"tpu": TPU, "tpu, two devices": {**TPU, "tensor_parallel_size": 2}}
LENGTHS = (1, 16, 17, 40, 64)
DECODERS: list[list[int]] = [[START], [START, 7], [START, *range(10, 40)]]


def client(tiny: Tiny, **settings: Any) -> EngineClient:
    return EngineClient(EngineConfig.from_kwargs(model=str(tiny.folder), **{**SETTINGS, **settings}), progress=False)


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": COUNT, "detokenize": False, **given})


def sources(tiny: Tiny) -> dict[int, list[int]]:
    return {length: encoder_input(tiny, length, length).tolist() for length in LENGTHS}


def pair(source: Any, decoder: Any) -> dict[str, Any]:
    return {"encoder_prompt": {"prompt_token_ids": source}, "decoder_prompt": {"prompt_token_ids": decoder}}


def greedy(tiny: Tiny, source: list[int], decoder: list[int], count: int = COUNT) -> list[int]:
    """transformers' tokens, one step after the other."""
    reference, ids = behind(tiny, torch.tensor(source, dtype=torch.int32)), list(decoder)
    while len(ids) < len(decoder) + count and (ids == decoder or ids[-1] != START):
        ids.append(int(reference.logits(ids)[-1].argmax()))
    return ids[len(decoder) :]


def add_all(made: EngineClient, tiny: Tiny) -> None:
    for length, source in sources(tiny).items():
        for index, decoder in enumerate(DECODERS):
            [prompt] = made.parse(pair(source, decoder))
            made.add(f"{length} {index}", prompt, params())


def run(made: EngineClient) -> dict[str, list[int]]:
    found: dict[str, Any] = {}
    while made.busy:
        found.update({each.request_id: each.outputs[0] for each in made.step()})
        made.engine.check_integrity()
    assert not any(each.error for each in found.values()), found
    return {name: list(each.token_ids) for name, each in found.items()}


def wanted(tiny: Tiny) -> dict[str, list[int]]:
    return {
        f"{length} {index}": greedy(tiny, source, decoder)
        for length, source in sources(tiny).items()
        for index, decoder in enumerate(DECODERS)
    }


@pytest.fixture(scope="module")
def bart() -> Tiny:
    return encoder_decoder("bart")


@pytest.fixture(scope="module")
def expected(bart: Tiny) -> dict[str, list[int]]:
    return wanted(bart)


@pytest.mark.parametrize("name", [*ENGINES, *(pytest.param(each, marks=tpu.needs_jax) for each in ON_TPU)])
def test_tokens_equal_transformers(name: str, bart: Tiny, expected: dict[str, list[int]]) -> None:
    made = client(bart, **{**ENGINES, **ON_TPU}[name])
    for _ in range(2):  # the second time steps are replayed, and texts are found in the cache
        add_all(made, bart)
        assert run(made) == expected
    if name.startswith("preempted"):
        assert made.engine.scheduler.stats().num_preemptions, "nothing was preempted"
    made.close()


def test_the_answers_differ_by_text(expected: dict[str, list[int]]) -> None:
    """Else nothing above would show that a text is read."""
    assert len({tuple(tokens) for name, tokens in expected.items() if name.endswith(" 0")}) == len(LENGTHS)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_transformers_tokens(family: str) -> None:
    tiny = encoder_decoder(family)
    made, want = client(tiny), wanted(tiny)
    add_all(made, tiny)
    assert run(made) == want
    made.close()


def test_marian_with_two_vocabularies() -> None:
    entries = {**ENCODER_DECODERS["marian"], "share_encoder_decoder_embeddings": False, "vocab_size": 140,
               "decoder_vocab_size": VOCAB}  # fmt: skip
    tiny = written(entries)
    made, want = client(tiny), wanted(tiny)
    assert any(token >= VOCAB for source in sources(tiny).values() for token in source)
    add_all(made, tiny)
    assert run(made) == want
    with pytest.raises(ValueError, match="120"):
        made.parse(pair([5, 6], [START, 120]))
    made.close()


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}],
                         ids=str)  # fmt: skip
def test_other_forms_of_weights_and_cache(settings: dict[str, Any], bart: Tiny) -> None:
    """A request's tokens are the same alone as in a batch."""
    made, alone = client(bart, **settings), {}
    for length, source in sources(bart).items():
        [prompt] = made.parse(source)
        made.add(str(length), prompt, params())
        alone.update(run(made))
    for length, source in sources(bart).items():
        [prompt] = made.parse(source)
        made.add(str(length), prompt, params())
    assert run(made) == alone
    made.close()


@pytest.mark.parametrize("settings", DEVICES)
def test_a_text_is_encoded_once(settings: dict[str, Any], bart: Tiny) -> None:
    made, source = client(bart, **settings), sources(bart)[40]
    encoder: Any = made.engine.scheduler.kv_cache_manager.encoder
    for turn, given in enumerate(({}, {"n": 3, "temperature": 1.0, "seed": 1})):
        [prompt] = made.parse(source)
        made.add(str(turn), prompt, params(**given))
    run(made)
    assert (encoder.num_passes, encoder.num_hits) == (1, 3)
    used = made.engine.scheduler.pool.num_used
    assert used == 0
    made.close()


def test_pages_are_as_many_as_the_text_needs(bart: Tiny) -> None:
    made = client(bart)
    pool = made.engine.scheduler.pool
    for length, pages in ((1, 1), (16, 1), (17, 2), (64, 4)):
        [prompt] = made.parse(sources(bart)[length])
        made.add("a", prompt, params(ignore_eos=True, max_tokens=4))
        made.step()
        assert pool.num_used == pages + 1
        made.abort(["a"])
        assert pool.num_used == 0
    made.close()


def test_forms_of_prompts(bart: Tiny) -> None:
    llm, source = LLM(str(bart.folder), use_tqdm=False, **SETTINGS), sources(bart)[17]
    forms: list[Any] = [
        source,
        {"prompt_token_ids": source},
        {"prompt_token_ids": source, "cache_salt": "tenant"},
        {"encoder_prompt": source, "decoder_prompt": None},
        {"encoder_prompt": {"prompt_token_ids": source, "multi_modal_data": {}}},
        {"encoder_prompt": {"prompt_token_ids": source}, "decoder_prompt": [START], "cache_salt": "tenant"},
        {"encoder_prompt": source, "decoder_prompt": {"prompt_token_ids": [START]}},
    ]
    outputs = llm.generate(forms, params(), use_tqdm=False)
    assert all(list(each.outputs[0].token_ids) == greedy(bart, source, [START]) for each in outputs)
    assert all(each.prompt_token_ids == [START] for each in outputs)
    [begun] = llm.generate([{"encoder_prompt": source, "decoder_prompt": [7]}], params(), use_tqdm=False)
    assert begun.prompt_token_ids == [START, 7], "a decoder's prompt begins with the start token"
    assert list(begun.outputs[0].token_ids) == greedy(bart, source, [START, 7])
    llm.close()


HOSTILE: dict[str, tuple[Any, str]] = {
    "nothing": ([], "empty"),
    "a number": (3.5, "type float"),
    "too long": ([5] * 65, "65 tokens, and the model's encoder takes 64"),
    "a token beyond": ([5, VOCAB], str(VOCAB)),
    "audio": ({"prompt_token_ids": [5], "multi_modal_data": {"audio": [0.0]}}, "no multi_modal_data"),
    "embeddings": ({"prompt_embeds": torch.zeros(2, 32)}, "no prompt_embeds"),
    "no encoder": ({"decoder_prompt": [5]}, "'encoder_prompt' is missing"),
    "nested": ({"encoder_prompt": {"encoder_prompt": [5]}, "decoder_prompt": [5]}, "no encoder_prompt"),
    "more beside": ({"encoder_prompt": [5], "decoder_prompt": [5], "prompt": "x"}, "not prompt"),
    "text without a tokenizer": ("hello", "no tokenizer"),
    "a salt of numbers": ({"prompt_token_ids": [5], "cache_salt": 3}, "cache_salt"),
    "a decoder's token beyond": (pair([5], [START, 10_000]), "'decoder_prompt'.*10000"),
    "a long decoder": (pair([5], [START] * 64), "max_model_len"),
    "a decoder of another type": ({"encoder_prompt": [5], "decoder_prompt": 7}, "type int"),
}


@pytest.fixture(scope="module")
def served(bart: Tiny) -> Any:
    llm = LLM(str(bart.folder), use_tqdm=False, **SETTINGS)
    yield llm
    llm.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_prompts_are_refused(served: LLM, name: str) -> None:
    prompt, why = HOSTILE[name]
    with pytest.raises(ValueError, match=why):
        served.generate([prompt], params(), use_tqdm=False)


def test_the_same_by_an_event_loop(bart: Tiny) -> None:
    llm, texts = AsyncLLM(str(bart.folder), **SETTINGS), sources(bart)

    async def answer(source: list[int]) -> list[int]:
        found: list[int] = []
        async for output in llm.generate({"prompt_token_ids": source}, params()):
            found = list(output.outputs[0].token_ids)
        return found

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*map(answer, texts.values()))

    assert asyncio.run(all_of_them()) == [greedy(bart, each, [START]) for each in texts.values()]
    llm.shutdown()


def changed(tiny: Tiny, folder: Path, **entries: Any) -> Tiny:
    """Returns a copy of the checkpoint with these entries in its generation config."""
    shutil.copytree(tiny.folder, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **entries}))
    return Tiny(folder, tiny.config, tiny.reference)


def test_the_generation_config_counts(bart: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A forced first token begins the decoder's prompt; words of one token, as Marian's padding, are never sampled."""
    source = sources(bart)[17]
    plain = greedy(bart, source, [START, 9])
    tiny = changed(bart, tmp_path / "forced", forced_bos_token_id=9, bad_words_ids=[[plain[0]]], num_beams=4)
    made = client(tiny)
    assert "not obeyed here: num_beams=4" in caplog.text
    assert "bad_words_ids" not in caplog.text and "forced_bos" not in caplog.text
    [prompt] = made.parse(source)
    assert prompt.token_ids == [START, 9]
    made.add("a", prompt, params())
    [found] = run(made).values()
    with torch.no_grad():
        logits = behind(tiny, torch.tensor(source, dtype=torch.int32)).logits([START, 9])[-1]
    logits[plain[0]] = -torch.inf
    assert found[0] == int(logits.argmax()) and plain[0] not in found
    made.close()
    for entries, why in (
        ({"decoder_start_token_id": 10_000}, "decoder_start_token_id is 10000"),
        ({"bad_words_ids": [[10_000]]}, "bad_words_ids"),
    ):
        with pytest.raises(ValueError, match=why):
            client(changed(bart, tmp_path / why.replace(" ", "-"), **entries))


def test_an_update_reaches_both_parts(bart: Tiny) -> None:
    """One table of tokens is a weight of the encoder and of the decoder."""
    from safetensors.torch import load_file

    new = encoder_decoder("bart", 1)
    llm, source = LLM(str(bart.folder), use_tqdm=False, **SETTINGS), sources(bart)[17]

    def tokens() -> list[int]:
        return list(llm.generate([source], params(), use_tqdm=False)[0].outputs[0].token_ids)

    assert tokens() == greedy(bart, source, [START])
    llm.update_weights(load_file(new.folder / "model.safetensors"))
    assert tokens() == greedy(new, source, [START])
    llm.update_weights(bart.reference.state_dict())
    assert tokens() == greedy(bart, source, [START])
    table = new.reference.model.shared.weight.detach()
    llm.update_weights({"model.shared.weight": table}, partial=True)
    mixed = Tiny(bart.folder, bart.config, copy.deepcopy(bart.reference))
    with torch.no_grad():
        mixed.reference.model.shared.weight.copy_(table)
    assert tokens() == greedy(mixed, source, [START])
    llm.close()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("t5", "learned bias by distance"),
        ("mt5", "learned bias by distance"),
        ("led", "sparse attention"),
        ("fsmt", "no file here computes it"),
    ],
)
def test_other_encoder_decoders_are_refused_by_name(kind: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "is_encoder_decoder": True}))
    with pytest.raises(ValueError, match=why) as error:
        EngineClient(EngineConfig.from_kwargs(model=str(tmp_path), device="cpu", load_format="dummy"), progress=False)
    assert kind in str(error.value) and "BART" in str(error.value)


def test_the_transformers_backend_is_refused(bart: Tiny) -> None:
    with pytest.raises(ValueError, match="decoders alone"):
        client(bart, model_impl="transformers")
