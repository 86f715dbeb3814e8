"""Prompts that are embeddings: the same as by token ids, to the bit, and what transformers says of inputs_embeds."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quintet import SamplingParams
from quintet.api.beam_search import search
from quintet.api.thread_sharing import SharedClient
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.client import EngineClient
from quintet.outputs import RequestOutput
from quintet.sampling_params import BeamSearchParams, ParameterError
from quintet_tools.checkpoints.tiny import FAMILIES, VOCAB, Tiny, variant
from tests.e2e.engine.test_oracle import client
from tests.helpers.platforms import tpu
from tests.helpers.platforms.null_engine import drain

ON = {"enable_prompt_embeds": True, "max_model_len": 160, "num_pages": 200}
LLAMA = ("llama", "plain", "float32", {})
PROMPTS = random_prompts(3, (33, 1, 70, 17), VOCAB)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "detokenize": False}


def embedded(tiny: Tiny, ids: list[int]) -> Tensor:
    """[1, T, H] as transformers hands them out: Gemma's are scaled."""
    with torch.no_grad():
        out: Tensor = tiny.reference.get_input_embeddings()(torch.tensor([ids]))
    return out


def given(tiny: Tiny, ids: list[int]) -> dict[str, Tensor]:
    return {"prompt_embeds": embedded(tiny, ids)}


def add(engine: EngineClient, name: str, prompt: Any, **params: Any) -> None:
    (parsed,) = engine.parse(prompt)
    engine.add(name, parsed, SamplingParams(**{**GREEDY, **params}))


def said(engine: EngineClient, prompts: dict[str, Any], **params: Any) -> dict[str, RequestOutput]:
    for name, prompt in prompts.items():
        add(engine, name, prompt, **params)
    return drain(engine)


def essence(output: RequestOutput) -> Any:
    return [
        (each.token_ids, [{i: p.logprob for i, p in at.items()} for at in each.logprobs or ()])
        for each in output.outputs
    ]


SERVED: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 7},
    "preempted": {"max_model_len": 120, "num_pages": 18, "page_size": 8, "enable_prefix_caching": False},
    "preempted, cached, chunked": {"max_model_len": 120, "num_pages": 18, "page_size": 8, "max_num_batched_tokens": 19},
}


@pytest.mark.parametrize("how", SERVED)
def test_they_say_what_the_ids_say_and_mix_with_ids_in_a_batch(how: str) -> None:
    tiny, engine = variant("llama", "plain"), client(LLAMA, **{**ON, **SERVED[how]})
    params = {"logprobs": 3, "temperature": 0.8, "seed": 7, "max_tokens": 24}
    ids = {str(index): prompt for index, prompt in enumerate(PROMPTS)}
    wanted = said(engine, ids, **params)
    for mixed in (range(4), (0, 3), (1, 2)):
        prompts = {str(i): given(tiny, p) if i in mixed else p for i, p in enumerate(PROMPTS)}
        for name, output in said(engine, prompts, **params).items():
            assert essence(output) == essence(wanted[name]), (how, mixed, name)
    assert engine.engine.stats().scheduler.num_preemptions > 0 or "preempted" not in how


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_what_transformers_says_of_inputs_embeds(family: str) -> None:
    """Of numbers that are no row of the table, so that nothing but they can be what was run."""
    name = next(iter(FAMILIES[family]))
    tiny, engine = variant(family, name), client((family, name, "float32", {}), **ON)
    x = embedded(tiny, PROMPTS[0]).roll(1, dims=-1) * 0.75
    # transformers' Gemma 3n has nothing for each layer of a text that is embeddings in part
    more = {"max_tokens": 1} if family == "gemma3n_text" else {}
    out = said(engine, {"a": {"prompt_embeds": x}}, logprobs=4, **more)["a"].outputs[0]
    with torch.no_grad():
        whole = torch.cat([x, embedded(tiny, list(out.token_ids))], 1)
        logits = tiny.reference(inputs_embeds=whole).logits[0, len(PROMPTS[0]) - 1 : -1].float()
    assert list(out.token_ids) == logits.argmax(-1).tolist()
    for at, wanted in zip(out.logprobs or (), logits.log_softmax(-1), strict=True):
        for token, logprob in at.items():
            assert logprob.logprob == pytest.approx(float(wanted[token]), abs=1e-3)


def test_half_precision_loses_nothing() -> None:
    tiny, engine = variant("llama", "plain"), client(("llama", "plain", "bfloat16", {}), **ON)
    x = embedded(tiny, PROMPTS[0]).bfloat16()
    both = said(engine, {"ids": PROMPTS[0], "embeds": {"prompt_embeds": x}}, logprobs=2)
    assert essence(both["embeds"]) == essence(both["ids"])


def test_a_beginning_is_found_again_by_its_bytes_and_never_by_ids() -> None:
    tiny, engine = variant("llama", "plain"), client(LLAMA, **ON)
    scheduler = engine.engine.scheduler
    said(engine, {"ids": [0] * 70})
    first = said(engine, {"a": given(tiny, PROMPTS[2])})["a"]
    assert scheduler.stats().prefix_hits == 0, "the ids that hold places are 0s, and find nothing of a prompt of 0s"
    again = said(engine, {"a": given(tiny, PROMPTS[2])})["a"]
    assert scheduler.stats().prefix_hits == 64 and again.num_cached_tokens == 64
    assert essence(again) == essence(first)
    x = embedded(tiny, PROMPTS[2])
    x[0, 20, 3] += 1e-3
    said(engine, {"a": {"prompt_embeds": x}})
    assert scheduler.stats().prefix_hits == 64 + 16, "one page stands before the number that is another"
    said(engine, {"ids": PROMPTS[2]})
    said(engine, {"salted": {**given(tiny, PROMPTS[2]), "cache_salt": "tenant"}})
    assert scheduler.stats().prefix_hits == 64 + 16


def test_what_the_request_says_is_cached_behind_its_embeddings() -> None:
    """A page that holds the end of the prompt and the first tokens of the output; the ids go on, as ids."""
    tiny, engine = variant("llama", "plain"), client(LLAMA, **ON)
    out = said(engine, {"a": given(tiny, PROMPTS[0])}, max_tokens=40)["a"]
    ids = list(out.outputs[0].token_ids)
    longer = torch.cat([embedded(tiny, PROMPTS[0]), embedded(tiny, ids)], 1)
    again = said(engine, {"b": {"prompt_embeds": longer}})["b"]
    assert again.num_cached_tokens == 32, "pages of embeddings alone are found"
    rest = said(client(LLAMA, **ON), {"b": [*PROMPTS[0], *ids]})["b"]
    assert essence(again) == essence(rest)


def test_the_last_token_alone_may_be_left_to_compute() -> None:
    """All but one are cached: a step of one token which is an embedding, beside one that decodes."""
    tiny, engine = variant("llama", "plain"), client(LLAMA, **ON)
    wanted = said(engine, {"a": PROMPTS[3], "b": PROMPTS[0]})
    said(engine, {"a": given(tiny, PROMPTS[3])})
    add(engine, "b", PROMPTS[0])
    engine.step()
    add(engine, "a", given(tiny, PROMPTS[3]))
    got = drain(engine)
    assert got["a"].num_cached_tokens == 16
    assert {name: essence(each) for name, each in got.items()} == {name: essence(each) for name, each in wanted.items()}


def test_penalties_and_text_know_nothing_of_the_ids_that_hold_places() -> None:
    tiny, engine = variant("llama", "plain"), client(LLAMA, **ON)
    bias: dict[str, Any] = {"logit_bias": {0: 60.0}, "repetition_penalty": 50.0, "max_tokens": 1}
    out = said(engine, {"embeds": given(tiny, PROMPTS[0]), "ids": [0, *PROMPTS[0]]}, **bias)
    assert list(out["embeds"].outputs[0].token_ids) == [0], "no 0 came before it"
    assert list(out["ids"].outputs[0].token_ids) != [0]
    assert out["embeds"].prompt_token_ids == [0] * len(PROMPTS[0]), "as vLLM's: places, no tokens"


def test_the_last_rows_are_kept_where_a_prompt_is_cut() -> None:
    tiny, engine = variant("llama", "plain"), client(LLAMA, **ON)
    out = said(engine, {"e": given(tiny, PROMPTS[2]), "i": PROMPTS[2]}, truncate_prompt_tokens=21)
    assert essence(out["e"]) == essence(out["i"]) and len(out["e"].prompt_token_ids) == 21


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([[0.5] * 48], "must be a torch tensor \\[tokens, 48\\], not list"),
        (torch.zeros(3, 47), "must be \\[tokens, 48\\], with one token at least, not \\[3, 47\\]"),
        (torch.zeros(0, 48), "with one token at least"),
        (torch.zeros(2, 3, 48), "must be \\[tokens, 48\\]"),
        (torch.zeros(3, 48, dtype=torch.float64), "must be in float32, bfloat16 or float16, not torch.float64"),
        (torch.full((3, 48), torch.nan), "must be finite"),
        (torch.zeros(3, 48).to_sparse(), "must be a dense tensor"),
        (torch.zeros(3, 48, device="meta"), "must be a dense tensor"),
    ],
)
def test_what_is_no_such_tensor_is_refused(prompt: Any, why: str) -> None:
    engine = small()
    with pytest.raises(ValueError, match=why):
        engine.parse({"prompt_embeds": prompt})


def test_what_goes_with_tokens_alone_is_refused() -> None:
    tiny, engine = variant("llama", "plain"), small()
    prompt = given(tiny, PROMPTS[1])
    with pytest.raises(ParameterError, match="prompt_logprobs are of tokens, and this prompt is embeddings"):
        add(engine, "a", prompt, prompt_logprobs=1)
    with pytest.raises(ValueError, match="leave out 'prompt' and 'prompt_token_ids'"):
        engine.parse({**prompt, "prompt": "text"})
    with pytest.raises(ValueError, match="beam_search goes on from token ids"):
        search(SharedClient(engine), engine.parse(prompt)[0], BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(ValueError, match="start with enable_prompt_embeds=True"):
        client(LLAMA, max_model_len=160, num_pages=20).parse(prompt)


def small() -> EngineClient:
    return client(LLAMA, **{**ON, "num_pages": 20})


@pytest.mark.slow
@tpu.needs_jax
def test_where_shapes_are_fixed_they_are_compiled_ahead() -> None:
    tiny = variant("llama", "plain")
    settings = {**ON, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    engine = client(LLAMA, "tpu", **settings, compilation_cache_dir=tpu.programs().name)
    assert [each.inputs for each in engine.engine_plan.fixed_shapes] == [("embed_indices",)] * 2
    compiled = tpu.compilations()
    prompts = {str(i): given(tiny, p) if i % 2 else p for i, p in enumerate(PROMPTS)}
    wanted = said(client(LLAMA, **settings), dict(zip("0123", PROMPTS, strict=True)))
    got = said(engine, prompts)
    assert [list(got[i].outputs[0].token_ids) for i in "0123"] == [list(wanted[i].outputs[0].token_ids) for i in "0123"]
    assert compiled == []
