"""Pictures where the device computes by ops alone: encoders run on the host, the text model on JAX's CPU devices."""

import pytest

from quintet import LLM, SamplingParams
from tests.helpers.media.wrappers import make, picture
from tests.helpers.platforms import tpu

pytest.importorskip("PIL")

COUNT = 5
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 512, "kv_cache_memory_bytes": "16M"}
ONE, TWO = picture(40, 56, 1), picture(31, 90, 2)


@pytest.mark.slow
@tpu.needs_jax
@pytest.mark.parametrize("kind", ["llava", "idefics3", "internvl"])
def test_tokens_are_those_of_transformers_alone_and_together(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = make(kind, tmp_path_factory.mktemp(kind))
    here = made.token
    cases = [("Hello there", []), (f"What is {here} this?", [ONE]), (f"{here}{here} both", [ONE, TWO])]
    wanted = [made.greedy(text, pictures, COUNT) for text, pictures in cases]
    prompts = [
        {"prompt": text, **({"multi_modal_data": {"image": pictures}} if pictures else {})} for text, pictures in cases
    ]
    llm = LLM(
        str(made.folder), device="tpu", dtype="float32", compilation_cache_dir=tpu.programs().name,
        mm_processor_kwargs=made.wrapper.options, use_tqdm=False, **SIZES,
    )  # fmt: skip
    for given in ([each] for each in prompts):
        assert llm.generate(given, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == wanted[prompts.index(given[0])]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in together] == wanted
    llm.reload_weights(str(made.folder))
    name, bias = next(each for each in made.model.named_parameters() if "vision" in each[0] and each[1].dim() == 1)
    llm.update_weights([(name, bias.detach().clone())], partial=True)
    assert llm.generate(prompts[1:2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == wanted[1]


@pytest.mark.slow
@tpu.needs_jax
def test_models_whose_tokens_have_three_positions_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = make("qwen2_vl", tmp_path_factory.mktemp("qwen2_vl"))
    llm = LLM(str(made.folder), device="tpu", dtype="float32", use_tqdm=False, **SIZES)
    with pytest.raises(ValueError, match="platform tpu computes neither three rotary positions"):
        llm.generate({"prompt": made.token, "multi_modal_data": {"image": ONE}}, GREEDY, use_tqdm=False)
